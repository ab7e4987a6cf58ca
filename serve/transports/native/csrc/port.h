/* A port that speaks gRPC over HTTP/2. libnghttp2 reads and writes the frames, and compresses the headers; this code
 * moves bytes between sockets, libnghttp2 and Python, and limits what a client can cost.
 *
 * Every function runs with Python's lock held, except the wait for events. So no data here needs a lock of its own. A
 * callback of libnghttp2 creates only objects without a garbage collector, and frees none, because Python code could
 * otherwise run inside of it. */
#ifndef ACCEL_PORT_H
#define ACCEL_PORT_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <nghttp2/nghttp2.h>
#include <stdbool.h>
#include <stdint.h>

/* What is new of a call. A call is OPENED once its headers are complete, and CLOSED if it ended before its answer. */
enum { OPENED = 1, MESSAGE = 2, ENDED = 4, CLOSED = 8, DRAINED = 16 };

/* What a client may send only so often, and the names of the counters. */
typedef enum { RESETS, PINGS, SETTINGS, PRIORITIES, EMPTY_DATA, CONTINUATIONS, HEADERS, KINDS } Kind;
extern const char *const KIND_NAMES[KINDS];

/* The statuses of gRPC that this code sends itself. */
enum { RESOURCE_EXHAUSTED = 8, INTERNAL = 13 };

typedef struct {
  double level, at; /* events that are not forgotten yet, and when they were counted */
} Bucket;

/* All connections from one address. */
typedef struct Peer {
  struct Peer *next;
  unsigned char address[16];
  unsigned connections;
  Bucket resets;
} Peer;

typedef struct {
  size_t message;      /* bytes of a message */
  size_t partial;      /* bytes of all large messages of a connection that are not complete */
  size_t headers;      /* bytes of the headers of a call, as SETTINGS_MAX_HEADER_LIST_SIZE counts them */
  uint32_t streams;    /* open calls of a connection */
  double resets;       /* of a connection in a second */
  unsigned per_address; /* connections of an address; 0: no limit */
} Limits;

/* A part of a message to send. */
typedef struct Chunk {
  struct Chunk *next;
  Py_buffer view;
  unsigned char prefix[5];
  size_t prefix_len, at; /* ``at`` counts the prefix, too */
} Chunk;

/* A complete message that Python has not taken. */
typedef struct Message {
  struct Message *next;
  PyObject *bytes;
  bool packed;
} Message;

#define DRAINED_AT (1 << 18) /* who sends an answer faster than the client reads is told when less is left, in bytes */

struct Connection;

typedef struct Call {
  PyObject_HEAD
  struct Port *port;
  struct Connection *connection; /* NULL once the call is over */
  struct Call *prev, *next;      /* of the connection */
  struct Call *next_ready, *next_closed;
  int32_t id;
  unsigned news;
  bool ready, opened, accepted, answered, counted, waiting, has_headers, deferred, finishing, told_full;
  bool bad_method, bad_type;
  /* The request. */
  PyObject *owner, *path, *encoding;
  double deadline; /* on Python's time.monotonic(); infinite without a deadline */
  char *headers;
  size_t headers_len, headers_cap, headers_size;
  unsigned char prefix[5];
  unsigned prefix_len;
  PyObject *partial; /* bytes */
  size_t partial_len, partial_want, reserved, unconsumed, held;
  Message *messages, *last_message;
  /* The answer. */
  Chunk *chunks, *last_chunk;
  size_t queued;
  int status;
  char *text; /* percent-encoded */
  size_t text_len;
} Call;

typedef struct Connection {
  struct Port *port;
  int fd;
  nghttp2_session *session; /* NULL until the first bytes come */
  Peer *peer;
  struct Connection *prev, *next, *next_dirty;
  bool dirty, dead, ending;
  uint32_t events; /* what epoll waits for */
  double since;
  Call *calls, *oldest; /* the newest, and the oldest */
  size_t partial;
  unsigned continuations;
  int flood; /* a Kind, or -1 */
  Bucket buckets[KINDS];
  char *out;
  size_t out_at, out_len, out_cap;
  void *tls;
  bool shaking;
  size_t ignored;
} Connection;

#define PEER_ROWS 1024

typedef struct Port {
  PyObject_HEAD
  int epoll, wake;
  int *listeners;
  size_t listener_count;
  bool listening, paused, inside, going_away;
  unsigned long thread;
  double now, swept;
  Limits limits;
  Connection *connections, *dirty;
  Call *ready, *last_ready, *closed;
  Chunk *garbage;
  Peer *peers[PEER_ROWS];
  uint64_t calls, accepted, refused, floods[KINDS];
  size_t open, counted;
  void *tls;
  nghttp2_session_callbacks *callbacks;
  nghttp2_option *option_set;
} Port;

/* connection.c */
int make_callbacks(Port *port);
void receive(Connection *connection);
void flush(Connection *connection);
void mark_dirty(Connection *connection);
Call *call_of(nghttp2_session *session, int32_t id); /* NULL once the call is over */
void end_calls(Connection *connection);
void go_away(Connection *connection);
void wait_for(Connection *connection, bool in, bool out);

/* face.c */
extern PyTypeObject *call_type;
int make_call_type(PyObject *module);

/* port.c */
void give_back(Port *port);

/* call.c */
Call *new_call(Connection *connection, int32_t id);
int take_header(Call *call, const uint8_t *name, size_t name_len, const uint8_t *value, size_t value_len);
int take_data(Call *call, const uint8_t *data, size_t len);
void tell(Call *call, unsigned news);
void headers_complete(Call *call);
void over(Call *call);
void go_on(Call *call);

/* answer.c */
void refuse(Call *call, int status, const char *text);
void answer_http(Call *call, const char *status);
bool queue_message(Call *call, PyObject *parts);
void push(Call *call);
bool submit_answer(Call *call);
ssize_t read_answer(nghttp2_session *, int32_t id, uint8_t *, size_t len, uint32_t *flags, nghttp2_data_source *, void *);
void drop_chunk(Call *call);

/* limits.c */
double clock_now(void);
bool too_many(Bucket *bucket, double now, double rate, double burst);
bool over_limit(Connection *connection, Kind kind);
Peer *find_peer(Port *port, const unsigned char address[16]);
void leave_peer(Port *port, Peer *peer);
void sweep_peers(Port *port);

/* tls.c */
int tls_use(Port *port, const char *certificate, const char *key, const char *client_ca, char *why, size_t why_len);
void tls_forget(Port *port);
int tls_open(Connection *connection);
int tls_shake(Connection *connection);
ssize_t tls_recv(Connection *connection, void *into, size_t len);
ssize_t tls_send(Connection *connection, const void *from, size_t len);
void tls_close(Connection *connection);

#endif
