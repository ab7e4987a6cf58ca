"""Contains the tests, in folders that mirror the folders of the source. ``tests.support`` has the code that tests of
several folders share."""
