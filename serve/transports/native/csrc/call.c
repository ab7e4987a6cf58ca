/* The request of a call: its headers and messages as they arrive. */
#include "port.h"

#include <math.h>
#include <string.h>

#define LARGE (1 << 16)       /* a message of this size counts in the limit of partial messages */
#define AT_ONCE (1 << 20)     /* bytes of a message that are allocated before they arrive */
#define HELD (1 << 18)        /* bytes of complete messages of a call that Python has not taken, before the client waits */

/* The news */

void tell(Call *call, unsigned news) {
  Port *port = call->port;
  call->news |= news;
  if (call->ready) return;
  call->ready = true;
  call->next_ready = NULL;
  Py_INCREF((PyObject *)call);
  if (port->last_ready)
    port->last_ready->next_ready = call;
  else
    port->ready = call;
  port->last_ready = call;
}

Call *new_call(Connection *connection, int32_t id) {
  Call *call = (Call *)PyType_GenericAlloc(call_type, 0);
  if (!call) return NULL;
  call->port = connection->port;
  Py_INCREF((PyObject *)call->port);
  call->connection = connection;
  call->id = id;
  call->deadline = INFINITY;
  call->next = connection->calls;
  if (call->next)
    call->next->prev = call;
  else
    connection->oldest = call;
  connection->calls = call;
  call->port->calls++;
  call->port->open++;
  return call;
}

/* Lets waiting large messages of a connection in, as far as they fit. The oldest call comes first, because clients that
 * send one call after another would otherwise pass it for ever. */
static void let_in(Connection *connection) {
  for (Call *call = connection->oldest; call; call = call->prev) {
    if (!call->waiting || call->answered) continue;
    if (connection->partial && connection->partial + call->partial_want > connection->port->limits.partial) return;
    call->waiting = false;
    call->reserved = call->partial_want;
    connection->partial += call->reserved;
    if (call->accepted && call->unconsumed && connection->session) {
      nghttp2_session_consume_stream(connection->session, call->id, call->unconsumed);
      call->unconsumed = 0;
      mark_dirty(connection);
    }
  }
}

static void free_reserved(Call *call) {
  if (!call->reserved) return;
  call->connection->partial -= call->reserved;
  call->reserved = 0;
  let_in(call->connection);
}

/* Ends a call: its stream is closed. The port drops the stream's reference later. */
void over(Call *call) {
  Connection *connection = call->connection;
  if (!connection) return;
  free_reserved(call);
  if (call->prev)
    call->prev->next = call->next;
  else
    connection->calls = call->next;
  if (call->next)
    call->next->prev = call->prev;
  else
    connection->oldest = call->prev;
  call->prev = call->next = NULL;
  call->connection = NULL;
  call->port->open--;
  if (call->counted) call->port->counted--;
  while (call->chunks) drop_chunk(call);
  if (!call->answered && call->opened) tell(call, CLOSED);
  call->next_closed = call->port->closed;
  call->port->closed = call;
}

/* Headers */

static bool is(const uint8_t *text, size_t len, const char *known) {
  return len == strlen(known) && !memcmp(text, known, len);
}

static bool begins(const uint8_t *text, size_t len, const char *known) {
  return len >= strlen(known) && !memcmp(text, known, strlen(known));
}

/* Returns the seconds of a grpc-timeout, or a negative number for a malformed one. */
static double read_timeout(const uint8_t *text, size_t len) {
  static const struct { char unit; double seconds; } units[] = {
      {'H', 3600}, {'M', 60}, {'S', 1}, {'m', 1e-3}, {'u', 1e-6}, {'n', 1e-9},
  };
  if (len < 2 || len > 9) return -1;
  double number = 0;
  for (size_t at = 0; at + 1 < len; at++) {
    if (text[at] < '0' || text[at] > '9') return -1;
    number = number * 10 + (text[at] - '0');
  }
  for (size_t at = 0; at < sizeof units / sizeof *units; at++)
    if (units[at].unit == (char)text[len - 1]) return number * units[at].seconds;
  return -1;
}

static int keep_header(Call *call, const uint8_t *name, size_t name_len, const uint8_t *value, size_t value_len) {
  uint32_t lengths[2] = {(uint32_t)name_len, (uint32_t)value_len};
  size_t needed = call->headers_len + sizeof lengths + name_len + value_len;
  if (needed > call->headers_cap) {
    size_t cap = needed > 512 ? needed * 2 : 512;
    char *grown = realloc(call->headers, cap);
    if (!grown) return -1;
    call->headers = grown;
    call->headers_cap = cap;
  }
  char *at = call->headers + call->headers_len;
  memcpy(at, lengths, sizeof lengths);
  memcpy(at + sizeof lengths, name, name_len);
  memcpy(at + sizeof lengths + name_len, value, value_len);
  call->headers_len = needed;
  return 0;
}

/* Returns -1 if there is no memory, or if the headers are so large that the connection has to end. */
int take_header(Call *call, const uint8_t *name, size_t name_len, const uint8_t *value, size_t value_len) {
  Port *port = call->port;
  call->headers_size += name_len + value_len + 32;
  if (call->headers_size > port->limits.headers) {
    if (call->headers_size > 4 * port->limits.headers) {
      over_limit(call->connection, HEADERS); /* has no rate: one such call is too many */
      return -1;
    }
    return 0; /* headers_complete refuses the call */
  }
  if (call->opened) return 0; /* trailers, which no client of gRPC sends; Python may read the headers just now */
  if (name_len && name[0] == ':') {
    if (is(name, name_len, ":path")) {
      if (call->path) return 0;
      call->path = PyUnicode_DecodeLatin1((const char *)value, (Py_ssize_t)value_len, NULL);
      return call->path ? 0 : -1;
    }
    if (is(name, name_len, ":method")) call->bad_method = !is(value, value_len, "POST");
    return 0;
  }
  if (is(name, name_len, "content-type")) {
    call->bad_type = !begins(value, value_len, "application/grpc");
    return 0;
  }
  if (is(name, name_len, "te")) return 0;
  if (is(name, name_len, "grpc-timeout")) {
    double seconds = read_timeout(value, value_len);
    if (seconds >= 0) call->deadline = port->now + seconds;
    return 0;
  }
  if (is(name, name_len, "grpc-encoding")) {
    if (call->encoding || is(value, value_len, "identity")) return 0;
    call->encoding = PyUnicode_DecodeLatin1((const char *)value, (Py_ssize_t)value_len, NULL);
    return call->encoding ? 0 : -1;
  }
  return keep_header(call, name, name_len, value, value_len);
}

/* Called when the first headers of a call are complete. */
void headers_complete(Call *call) {
  call->opened = true;
  if (call->headers_size > call->port->limits.headers)
    refuse(call, RESOURCE_EXHAUSTED, "received metadata size exceeds the limit");
  else if (call->bad_method)
    answer_http(call, "405");
  else if (call->bad_type)
    answer_http(call, "415");
  else
    tell(call, OPENED);
}

/* Messages */

static int deliver(Call *call) {
  PyObject *message = call->partial;
  call->partial = NULL;
  call->held += call->partial_want;
  free_reserved(call);
  call->prefix_len = 0;
  Message *made = malloc(sizeof *made);
  if (!made) {
    call->partial = message; /* over() frees it */
    return -1;
  }
  *made = (Message){.bytes = message, .packed = call->prefix[0]};
  *(call->messages ? &call->last_message->next : &call->messages) = made;
  call->last_message = made;
  tell(call, MESSAGE);
  return 0;
}

static int begin_message(Call *call) {
  const unsigned char *prefix = call->prefix;
  size_t want = (size_t)prefix[1] << 24 | (size_t)prefix[2] << 16 | (size_t)prefix[3] << 8 | prefix[4];
  Port *port = call->port;
  if (prefix[0] > 1) {
    refuse(call, INTERNAL, "a message begins with an unknown flag");
    return 0;
  }
  if (want > port->limits.message) {
    char text[96];
    PyOS_snprintf(text, sizeof text, "SERVER: Received message larger than max (%zu vs. %zu)", want,
                  port->limits.message);
    refuse(call, RESOURCE_EXHAUSTED, text);
    return 0;
  }
  size_t cap = want <= AT_ONCE ? want : HELD;
  call->partial = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)cap);
  if (!call->partial) return -1;
  call->partial_want = want;
  call->partial_len = 0;
  if (want > LARGE) {
    call->waiting = true;
    let_in(call->connection);
  }
  return want ? 0 : deliver(call);
}

/* Makes room for the whole message, once so much has arrived that the client means it. */
static int grow(Call *call, size_t needed) {
  if (needed <= (size_t)PyBytes_Size(call->partial)) return 0;
  PyObject *grown = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)call->partial_want);
  if (!grown) return -1;
  memcpy(PyBytes_AsString(grown), PyBytes_AsString(call->partial), call->partial_len);
  Py_DECREF(call->partial);
  call->partial = grown;
  return 0;
}

static int take_bytes(Call *call, const uint8_t *data, size_t len) {
  while (len && !call->answered) {
    if (!call->partial) {
      size_t count = 5 - call->prefix_len < len ? 5 - call->prefix_len : len;
      memcpy(call->prefix + call->prefix_len, data, count);
      call->prefix_len += (unsigned)count;
      data += count;
      len -= count;
      if (call->prefix_len == 5 && begin_message(call)) return -1;
      continue;
    }
    size_t left = call->partial_want - call->partial_len, count = left < len ? left : len;
    if (grow(call, call->partial_len + count)) return -1;
    memcpy(PyBytes_AsString(call->partial) + call->partial_len, data, count);
    call->partial_len += count;
    data += count;
    len -= count;
    if (call->partial_len == call->partial_want && deliver(call)) return -1;
  }
  return 0;
}

static bool may_go_on(Call *call) {
  return call->answered || (call->accepted && !call->waiting && call->held <= HELD);
}

/* Takes bytes of the request. Returns -1 without memory. */
int take_data(Call *call, const uint8_t *data, size_t len) {
  if (take_bytes(call, data, len)) return -1;
  if (may_go_on(call))
    nghttp2_session_consume_stream(call->connection->session, call->id, len);
  else
    call->unconsumed += len;
  return 0;
}

/* Lets the client send more, if the call may go on. */
void go_on(Call *call) {
  if (!call->connection || !call->unconsumed || !may_go_on(call)) return;
  nghttp2_session_consume_stream(call->connection->session, call->id, call->unconsumed);
  call->unconsumed = 0;
  push(call);
}
