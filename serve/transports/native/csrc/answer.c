/* The answer of a call. */
#include "port.h"

#include <string.h>
#include <unistd.h>

#define PAIR(name, value) \
  {(uint8_t *)(name), (uint8_t *)(value), sizeof(name) - 1, sizeof(value) - 1, \
   NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE}

void drop_chunk(Call *call) {
  Chunk *chunk = call->chunks;
  call->chunks = chunk->next;
  if (!call->chunks) call->last_chunk = NULL;
  chunk->next = call->port->garbage;
  call->port->garbage = chunk;
}

static nghttp2_nv status_pairs[17];

static nghttp2_nv status_pair(int status) {
  static char numbers[17][3];
  if (!status_pairs[status].name) {
    PyOS_snprintf(numbers[status], 3, "%d", status);
    nghttp2_nv made = PAIR("grpc-status", "");
    made.value = (uint8_t *)numbers[status];
    made.valuelen = strlen(numbers[status]);
    status_pairs[status] = made;
  }
  return status_pairs[status];
}

static size_t trailers(Call *call, nghttp2_nv *into) {
  into[0] = status_pair(call->status);
  if (!call->text_len) return 1;
  nghttp2_nv made = PAIR("grpc-message", "");
  made.value = (uint8_t *)call->text;
  made.valuelen = call->text_len;
  made.flags = NGHTTP2_NV_FLAG_NO_COPY_NAME;
  into[1] = made;
  return 2;
}

static const nghttp2_nv HEAD[] = {
    PAIR(":status", "200"),
    PAIR("content-type", "application/grpc"),
    PAIR("grpc-accept-encoding", "identity, deflate, gzip"),
};
#define HEAD_COUNT 3

/* Gives libnghttp2 what is to be sent. Returns false if it takes nothing more for this call. */
bool submit_answer(Call *call) {
  nghttp2_session *session = call->connection->session;
  nghttp2_nv pairs[HEAD_COUNT + 2];
  memcpy(pairs, HEAD, sizeof HEAD);
  if (call->has_headers) {
    if (call->deferred) {
      call->deferred = false;
      return !nghttp2_session_resume_data(session, call->id);
    }
    return true;
  }
  call->has_headers = true;
  if (call->finishing && !call->chunks) {
    size_t count = trailers(call, pairs + HEAD_COUNT);
    return !nghttp2_submit_response(session, call->id, pairs, HEAD_COUNT + count, NULL);
  }
  nghttp2_data_provider provider = {.read_callback = read_answer};
  return !nghttp2_submit_response(session, call->id, pairs, HEAD_COUNT, &provider);
}

void answer_http(Call *call, const char *status) {
  nghttp2_nv pair = PAIR(":status", "");
  pair.value = (uint8_t *)status;
  pair.valuelen = strlen(status);
  call->answered = true;
  nghttp2_submit_response(call->connection->session, call->id, &pair, 1, NULL);
}

void refuse(Call *call, int status, const char *text) {
  if (call->answered) return;
  call->answered = call->finishing = true;
  call->status = status;
  call->text = strdup(text);
  call->text_len = call->text ? strlen(text) : 0;
  submit_answer(call);
  if (call->opened) tell(call, CLOSED);
}

/* Tells libnghttp2 how many bytes the next DATA frame has. send_data copies them. */
ssize_t read_answer(nghttp2_session *session, int32_t id, uint8_t *into, size_t len, uint32_t *flags,
                    nghttp2_data_source *source, void *data) {
  (void)into, (void)source, (void)data;
  Call *call = call_of(session, id);
  if (!call) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
  size_t found = call->queued < len ? call->queued : len;
  if (!found && !call->finishing) {
    call->deferred = true;
    return NGHTTP2_ERR_DEFERRED;
  }
  *flags |= NGHTTP2_DATA_FLAG_NO_COPY;
  if (call->finishing && found == call->queued) {
    *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
    nghttp2_nv pairs[2];
    size_t count = trailers(call, pairs);
    if (nghttp2_submit_trailer(session, id, pairs, count)) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
  }
  return (ssize_t)found;
}

bool queue_message(Call *call, PyObject *parts) {
  Py_ssize_t count = PyTuple_Size(parts);
  if (count < 0) return false;
  Chunk *first = NULL, *last = NULL;
  size_t total = 0;
  for (Py_ssize_t at = 0; at < (count ? count : 1); at++) {
    Chunk *chunk = calloc(1, sizeof *chunk);
    bool filled = chunk && (!count || !PyObject_GetBuffer(PyTuple_GetItem(parts, at), &chunk->view, PyBUF_SIMPLE));
    if (!filled) {
      free(chunk);
      if (!PyErr_Occurred()) PyErr_NoMemory();
      for (; first; first = last) {
        last = first->next;
        PyBuffer_Release(&first->view);
        free(first);
      }
      return false;
    }
    total += (size_t)chunk->view.len;
    if (last)
      last->next = chunk;
    else
      first = chunk;
    last = chunk;
  }
  if (total > UINT32_MAX) total = UINT32_MAX; /* accel's limit of a message is lower */
  for (int at = 0; at < 4; at++) first->prefix[at + 1] = (unsigned char)(total >> (24 - 8 * at));
  first->prefix_len = 5;
  call->queued += total + 5;
  if (call->last_chunk)
    call->last_chunk->next = first;
  else
    call->chunks = first;
  call->last_chunk = last;
  return true;
}

/* Sends at once, unless the port's thread does so soon. */
void push(Call *call) {
  Connection *connection = call->connection;
  Port *port = call->port;
  mark_dirty(connection);
  if (port->inside || PyThread_get_thread_ident() == port->thread) return;
  port->inside = true;
  flush(connection);
  port->inside = false;
  bool woken = connection->dead || port->closed || port->ready;
  give_back(port); /* Python code runs, and the other thread may free the connection */
  if (woken) {
    uint64_t one = 1;
    if (write(port->wake, &one, sizeof one) < 0) return;
  }
}
