"""What a graph costs, and a page that shows it."""
