/* Limits what a connection, and an address, may do in a second. */
#include "port.h"

#include <math.h>
#include <string.h>
#include <time.h>

const char *const KIND_NAMES[KINDS] = {
    "resets", "pings", "settings", "priorities", "empty_data", "continuations", "headers",
};

#define ADDRESS_FACTOR 10 /* many clients may share an address */

/* What a connection may send in a second, and at once. The limit of RESETS is an option. No client that accel knows
 * comes near the others. */
static const double RATES[KINDS][2] = {
    [PINGS] = {100, 1000}, [SETTINGS] = {10, 100}, [PRIORITIES] = {100, 1000}, [EMPTY_DATA] = {100, 1000},
};

double clock_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Counts an event. ``rate`` events are forgotten in a second. Returns true if more than ``burst`` are remembered. */
bool too_many(Bucket *bucket, double now, double rate, double burst) {
  bucket->level = fmax(0, bucket->level - (now - bucket->at) * rate) + 1;
  bucket->at = now;
  return bucket->level > burst;
}

bool over_limit(Connection *connection, Kind kind) {
  Port *port = connection->port;
  double rate = RATES[kind][0], burst = RATES[kind][1];
  bool over = false;
  if (kind == RESETS) {
    rate = port->limits.resets;
    burst = fmax(1, rate);
    if (rate <= 0) return false;
    over = too_many(&connection->peer->resets, port->now, rate * ADDRESS_FACTOR, burst * ADDRESS_FACTOR);
  }
  over |= too_many(&connection->buckets[kind], port->now, rate, burst);
  if (over && connection->flood < 0) {
    connection->flood = kind;
    port->floods[kind]++;
  }
  return over;
}

static unsigned row_of(const unsigned char address[16]) {
  uint32_t hash = 2166136261u; /* FNV-1a */
  for (int at = 0; at < 16; at++) hash = (hash ^ address[at]) * 16777619u;
  return hash % PEER_ROWS;
}

/* Returns the row of an address, and counts a connection. Returns NULL without memory. */
Peer *find_peer(Port *port, const unsigned char address[16]) {
  Peer **row = &port->peers[row_of(address)];
  Peer *found = *row;
  while (found && memcmp(found->address, address, 16)) found = found->next;
  if (!found) {
    found = calloc(1, sizeof *found);
    if (!found) return NULL;
    memcpy(found->address, address, 16);
    found->next = *row;
    *row = found;
  }
  found->connections++;
  return found;
}

void leave_peer(Port *port, Peer *peer) {
  (void)port;
  peer->connections--; /* sweep_peers frees it, once its resets are forgotten */
}

void sweep_peers(Port *port) {
  for (size_t at = 0; at < PEER_ROWS; at++) {
    for (Peer **link = &port->peers[at]; *link;) {
      Peer *peer = *link;
      if (!peer->connections && port->now - peer->resets.at > 10) {
        *link = peer->next;
        free(peer);
      } else {
        link = &peer->next;
      }
    }
  }
}
