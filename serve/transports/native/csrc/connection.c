/* One connection: moves bytes between its socket and libnghttp2, and counts what costs the server more than the
 * client. */
#include "port.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#define IN_BYTES (1 << 18)
#define OUT_BYTES (1 << 18)    /* that wait for the socket */
#define MOST_ROUNDS 16         /* of OUT_BYTES, then other connections and threads have their turn */
#define WINDOW (1 << 18)       /* of a call */
#define ALL_WINDOW (1 << 24)   /* of a connection */
#define MOST_CONTINUATIONS 7   /* frames of the headers of a call; newer versions of libnghttp2 take 8 */
#define MOST_IGNORED (1 << 20) /* bytes that come after the end */

/* Some versions of libnghttp2 don't have it. */
extern void nghttp2_option_set_stream_reset_rate_limit(nghttp2_option *, uint64_t, uint64_t) __attribute__((weak));

static bool tries_again(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

void wait_for(Connection *connection, bool in, bool out) {
  uint32_t events = (in ? EPOLLIN : 0u) | (out ? EPOLLOUT : 0u);
  if (events == connection->events) return;
  connection->events = events;
  struct epoll_event event = {.events = events, .data = {.ptr = connection}};
  epoll_ctl(connection->port->epoll, EPOLL_CTL_MOD, connection->fd, &event);
}

void mark_dirty(Connection *connection) {
  if (connection->dirty) return;
  connection->dirty = true;
  connection->next_dirty = connection->port->dirty;
  connection->port->dirty = connection;
}

Call *call_of(nghttp2_session *session, int32_t id) { return nghttp2_session_get_stream_user_data(session, id); }

void end_calls(Connection *connection) {
  while (connection->calls) {
    Call *call = connection->calls;
    if (connection->session) nghttp2_session_set_stream_user_data(connection->session, call->id, NULL);
    over(call);
  }
}

static void die(Connection *connection) {
  connection->dead = true;
  mark_dirty(connection); /* the port frees it */
}

/* Sending */

static bool room(Connection *connection, size_t more) {
  size_t needed = connection->out_len + more;
  if (needed <= connection->out_cap) return true;
  size_t cap = needed * 2 > 4096 ? needed * 2 : 4096;
  char *grown = realloc(connection->out, cap);
  if (!grown) return false;
  connection->out = grown;
  connection->out_cap = cap;
  return true;
}

static bool put(Connection *connection, const void *from, size_t len) {
  if (!room(connection, len)) return false;
  memcpy(connection->out + connection->out_len, from, len);
  connection->out_len += len;
  return true;
}

/* Copies the payload of a DATA frame from the parts of the message. */
static int send_data(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head, size_t len,
                     nghttp2_data_source *source, void *data) {
  (void)source;
  Connection *connection = data;
  Call *call = call_of(session, frame->hd.stream_id);
  if (!call) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE; /* end_calls was here */
  if (connection->out_len > OUT_BYTES) return NGHTTP2_ERR_WOULDBLOCK;
  if (!room(connection, 9 + len)) return NGHTTP2_ERR_CALLBACK_FAILURE;
  put(connection, head, 9);
  call->queued -= len;
  while (call->chunks) {
    Chunk *chunk = call->chunks;
    size_t all = chunk->prefix_len + (size_t)chunk->view.len;
    while (len && chunk->at < all) {
      bool in_prefix = chunk->at < chunk->prefix_len;
      const char *from = in_prefix ? (const char *)chunk->prefix + chunk->at
                                   : (const char *)chunk->view.buf + (chunk->at - chunk->prefix_len);
      size_t left = in_prefix ? chunk->prefix_len - chunk->at : all - chunk->at, count = left < len ? left : len;
      put(connection, from, count);
      chunk->at += count;
      len -= count;
    }
    if (chunk->at < all) break;
    drop_chunk(call);
  }
  if (call->told_full && call->queued <= DRAINED_AT && !call->answered) {
    call->told_full = false;
    tell(call, DRAINED);
  }
  return 0;
}

/* Returns 1 once all is sent, 0 if the socket takes no more, and -1 if the connection is broken. */
static int send_out(Connection *connection) {
  while (connection->out_at < connection->out_len) {
    const char *from = connection->out + connection->out_at;
    size_t len = connection->out_len - connection->out_at;
    ssize_t sent = connection->tls ? tls_send(connection, from, len) : send(connection->fd, from, len, MSG_NOSIGNAL);
    if (sent < 0) return tries_again() ? 0 : -1;
    connection->out_at += (size_t)sent;
  }
  connection->out_at = connection->out_len = 0;
  if (connection->out_cap > 2 * OUT_BYTES) {
    free(connection->out);
    connection->out = NULL;
    connection->out_cap = 0;
  }
  return 1;
}

/* Collects what libnghttp2 has to send. Returns false if the connection is broken. */
static bool collect(Connection *connection) {
  while (connection->out_len <= OUT_BYTES) {
    const uint8_t *data;
    ssize_t len = nghttp2_session_mem_send(connection->session, &data);
    if (len < 0) return false;
    if (!len) break;
    if (!put(connection, data, (size_t)len)) return false;
  }
  return true;
}

/* Sends as much as the socket takes. */
void flush(Connection *connection) {
  if (connection->dead || !connection->session || connection->shaking) return;
  for (int round = 0;; round++) {
    int sent = send_out(connection);
    if (sent < 0) return die(connection);
    if (!sent || round == MOST_ROUNDS) return wait_for(connection, connection->ending, true);
    if (!collect(connection)) return die(connection);
    if (!connection->out_len) break;
  }
  if (connection->ending) {
    shutdown(connection->fd, SHUT_WR); /* a close with unread bytes would take back the last frames */
    return wait_for(connection, true, false);
  }
  if (!nghttp2_session_want_read(connection->session) && !nghttp2_session_want_write(connection->session))
    return die(connection);
  wait_for(connection, true, false);
}

/* Ends a connection that breaks the protocol or a limit. */
static void end(Connection *connection, uint32_t code) {
  end_calls(connection);
  nghttp2_session_terminate_session(connection->session, code);
  connection->ending = true;
  connection->since = connection->port->now;
  mark_dirty(connection);
}

/* Tells the client to open its next calls on another connection. A connection that it opens afterwards gets no such
 * notice: a client of gRPC tries again and again, without a pause, as long as every connection tells it to leave. */
void go_away(Connection *connection) {
  if (!connection->session || connection->ending || connection->dead) return;
  nghttp2_submit_shutdown_notice(connection->session);
  mark_dirty(connection);
}

/* Receiving */

static int on_begin_frame(nghttp2_session *session, const nghttp2_frame_hd *head, void *data) {
  (void)session;
  Connection *connection = data;
  bool over = false;
  switch (head->type) {
    case NGHTTP2_PING: over = over_limit(connection, PINGS); break;
    case NGHTTP2_SETTINGS: over = over_limit(connection, SETTINGS); break;
    case NGHTTP2_PRIORITY: over = over_limit(connection, PRIORITIES); break;
    case NGHTTP2_DATA:
      if (!head->length && !(head->flags & NGHTTP2_FLAG_END_STREAM)) over = over_limit(connection, EMPTY_DATA);
      break;
    case NGHTTP2_HEADERS: connection->continuations = 0; break;
    case NGHTTP2_CONTINUATION:
      if (++connection->continuations > MOST_CONTINUATIONS) over = over_limit(connection, CONTINUATIONS);
      break;
    default: break;
  }
  return over ? NGHTTP2_ERR_CALLBACK_FAILURE : 0;
}

static int on_begin_headers(nghttp2_session *session, const nghttp2_frame *frame, void *data) {
  if (frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
  Call *call = new_call(data, frame->hd.stream_id);
  if (!call) return NGHTTP2_ERR_CALLBACK_FAILURE;
  nghttp2_session_set_stream_user_data(session, frame->hd.stream_id, call);
  return 0;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name, size_t name_len,
                     const uint8_t *value, size_t value_len, uint8_t flags, void *data) {
  (void)flags, (void)data;
  Call *call = call_of(session, frame->hd.stream_id);
  if (!call) return 0;
  return take_header(call, name, name_len, value, value_len) ? NGHTTP2_ERR_CALLBACK_FAILURE : 0;
}

static int on_frame_recv(nghttp2_session *session, const nghttp2_frame *frame, void *data) {
  (void)data;
  if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return 0;
  Call *call = call_of(session, frame->hd.stream_id);
  if (!call) return 0;
  if (frame->hd.type == NGHTTP2_HEADERS && frame->headers.cat == NGHTTP2_HCAT_REQUEST) headers_complete(call);
  if (frame->hd.flags & NGHTTP2_FLAG_END_STREAM && !call->answered) tell(call, ENDED);
  return 0;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t id, const uint8_t *bytes, size_t len, void *data) {
  (void)flags, (void)data;
  nghttp2_session_consume_connection(session, len);
  Call *call = call_of(session, id);
  if (!call) return 0;
  return take_data(call, bytes, len) ? NGHTTP2_ERR_CALLBACK_FAILURE : 0;
}

/* A client that still sends a request after the answer is told to stop. */
static int on_frame_send(nghttp2_session *session, const nghttp2_frame *frame, void *data) {
  (void)data;
  if (frame->hd.type == NGHTTP2_HEADERS && frame->hd.flags & NGHTTP2_FLAG_END_STREAM &&
      !nghttp2_session_get_stream_remote_close(session, frame->hd.stream_id))
    nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id, NGHTTP2_NO_ERROR);
  return 0;
}

static int on_stream_close(nghttp2_session *session, int32_t id, uint32_t code, void *data) {
  Connection *connection = data;
  Call *call = call_of(session, id);
  if (call) over(call);
  /* Also counts calls that the client makes the server reset, and those that it resets without an error. */
  bool reset = code != NGHTTP2_NO_ERROR || !nghttp2_session_get_stream_local_close(session, id);
  if (reset && !connection->ending && over_limit(connection, RESETS)) return NGHTTP2_ERR_CALLBACK_FAILURE;
  return 0;
}

int make_callbacks(Port *port) {
  if (nghttp2_session_callbacks_new(&port->callbacks) || nghttp2_option_new(&port->option_set)) return -1;
  nghttp2_session_callbacks *made = port->callbacks;
  nghttp2_session_callbacks_set_on_begin_frame_callback(made, on_begin_frame);
  nghttp2_session_callbacks_set_on_begin_headers_callback(made, on_begin_headers);
  nghttp2_session_callbacks_set_on_header_callback(made, on_header);
  nghttp2_session_callbacks_set_on_frame_recv_callback(made, on_frame_recv);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(made, on_data);
  nghttp2_session_callbacks_set_on_frame_send_callback(made, on_frame_send);
  nghttp2_session_callbacks_set_on_stream_close_callback(made, on_stream_close);
  nghttp2_session_callbacks_set_send_data_callback(made, send_data);
  nghttp2_option_set_no_auto_window_update(port->option_set, 1);
  /* The limit of RESETS is an option. */
  if (nghttp2_option_set_stream_reset_rate_limit)
    nghttp2_option_set_stream_reset_rate_limit(port->option_set, UINT64_MAX, UINT64_MAX);
  /* Clients of gRPC send such values, "authorization: Bearer " among them. */
  nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation(port->option_set, 1);
  return 0;
}

static bool open_session(Connection *connection) {
  Port *port = connection->port;
  if (nghttp2_session_server_new2(&connection->session, port->callbacks, connection, port->option_set)) return false;
  nghttp2_settings_entry settings[] = {
      {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, port->limits.streams},
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, WINDOW},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, (uint32_t)port->limits.headers},
  };
  nghttp2_submit_settings(connection->session, NGHTTP2_FLAG_NONE, settings, sizeof settings / sizeof *settings);
  nghttp2_session_set_local_window_size(connection->session, NGHTTP2_FLAG_NONE, 0, ALL_WINDOW);
  mark_dirty(connection);
  return true;
}

static ssize_t take(Connection *connection, void *into, size_t len) {
  return connection->tls ? tls_recv(connection, into, len) : recv(connection->fd, into, len, 0);
}

/* Reads what has arrived, and marks the connection as dead if it is over. */
void receive(Connection *connection) {
  static uint8_t bytes[IN_BYTES]; /* under Python's lock */
  if (connection->shaking) {
    int shaken = tls_shake(connection);
    if (shaken < 0) return die(connection);
    if (!shaken) return;
    connection->shaking = false;
  }
  for (int round = 0; round < 4; round++) { /* other connections have their turn, too */
    ssize_t len = take(connection, bytes, sizeof bytes);
    if (len < 0 && tries_again()) return;
    if (len <= 0) return die(connection);
    if (connection->ending) {
      connection->ignored += (size_t)len;
      if (connection->ignored > MOST_IGNORED) return die(connection);
      continue;
    }
    if (!connection->session && !open_session(connection)) return die(connection);
    ssize_t used = nghttp2_session_mem_recv(connection->session, bytes, (size_t)len);
    if (connection->flood >= 0) return end(connection, NGHTTP2_ENHANCE_YOUR_CALM);
    if (used == NGHTTP2_ERR_BAD_CLIENT_MAGIC || used == NGHTTP2_ERR_NOMEM) return die(connection);
    if (used < 0) return end(connection, NGHTTP2_PROTOCOL_ERROR);
    mark_dirty(connection);
    if ((size_t)len < sizeof bytes && !connection->tls) return;
  }
}
