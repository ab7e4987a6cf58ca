/* The port: its sockets, and the loop over what happens to them. */
#include "port.h"

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST_EVENTS 256
#define PATIENCE 120.0 /* seconds until the first bytes of a connection, and the end of a TLS handshake */
#define AWAKE 60e-6    /* seconds without events before the thread sleeps */
#define LINGER 1.0     /* seconds that a client has to read why its connection ends */

/* Frees what the calls left behind. Python code may run in here. */
void give_back(Port *port) {
  while (port->garbage) {
    Chunk *chunk = port->garbage;
    port->garbage = chunk->next;
    PyBuffer_Release(&chunk->view);
    free(chunk);
  }
}

static void drop_owner(Call *call) {
  PyObject *owner = call->owner;
  call->owner = NULL;
  Py_XDECREF(owner);
}

static void drop_closed(Port *port) {
  while (port->closed) {
    Call *call = port->closed;
    port->closed = call->next_closed;
    if (!call->ready) drop_owner(call);
    Py_DECREF((PyObject *)call); /* the stream's reference */
  }
}

/* Connections */

static void free_connection(Connection *connection) {
  Port *port = connection->port;
  end_calls(connection);
  if (connection->session) nghttp2_session_del(connection->session);
  if (connection->tls) tls_close(connection);
  close(connection->fd); /* also leaves epoll */
  if (connection->prev)
    connection->prev->next = connection->next;
  else
    port->connections = connection->next;
  if (connection->next) connection->next->prev = connection->prev;
  leave_peer(port, connection->peer);
  free(connection->out);
  free(connection);
}

static void flush_dirty(Port *port) {
  while (port->dirty) {
    Connection *connection = port->dirty;
    port->dirty = connection->next_dirty;
    connection->dirty = false;
    if (!connection->dead) flush(connection);
    if (!connection->dead) continue;
    if (connection->dirty) { /* flush found out */
      port->dirty = connection->next_dirty;
      connection->dirty = false;
    }
    free_connection(connection);
  }
}

static void address_of(const struct sockaddr_storage *from, unsigned char into[16]) {
  memset(into, 0, 16);
  if (from->ss_family == AF_INET) {
    memcpy(into + 12, &((const struct sockaddr_in *)from)->sin_addr, 4);
    return;
  }
  if (from->ss_family != AF_INET6) return;
  const struct in6_addr *found = &((const struct sockaddr_in6 *)from)->sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(found))
    memcpy(into + 12, found->s6_addr + 12, 4);
  else
    memcpy(into, found->s6_addr, 8); /* one host has all addresses of a /64 */
}

static void open_connection(Port *port, int fd, const struct sockaddr_storage *from) {
  unsigned char address[16];
  address_of(from, address);
  Peer *peer = find_peer(port, address);
  Connection *made = peer ? calloc(1, sizeof *made) : NULL;
  if (!made) {
    if (peer) leave_peer(port, peer);
    close(fd);
    return;
  }
  if (port->limits.per_address && peer->connections > port->limits.per_address) {
    port->refused++;
    leave_peer(port, peer);
    free(made);
    close(fd);
    return;
  }
  int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  *made = (Connection){.port = port, .fd = fd, .peer = peer, .since = port->now, .flood = -1, .events = EPOLLIN};
  made->next = port->connections;
  if (made->next) made->next->prev = made;
  port->connections = made;
  port->accepted++;
  struct epoll_event event = {.events = made->events, .data = {.ptr = made}};
  if ((port->tls && tls_open(made)) || epoll_ctl(port->epoll, EPOLL_CTL_ADD, fd, &event)) {
    made->dead = true;
    mark_dirty(made);
  }
}

static void listen_to(Port *port, bool on) {
  for (size_t at = 0; at < port->listener_count; at++) {
    struct epoll_event event = {.events = on ? EPOLLIN : 0, .data = {.ptr = &port->listeners[at]}};
    epoll_ctl(port->epoll, EPOLL_CTL_MOD, port->listeners[at], &event);
  }
  port->paused = !on;
}

static void accept_from(Port *port, int listener) {
  for (int count = 0; count < 64; count++) {
    struct sockaddr_storage from;
    socklen_t len = sizeof from;
    int fd = accept4(listener, (struct sockaddr *)&from, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      open_connection(port, fd, &from);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      listen_to(port, false); /* until the next sweep, as the loop would spin */
      return;
    } else if (errno != ECONNABORTED && errno != EINTR) {
      return;
    }
  }
}

static void sweep(Port *port) {
  if (port->now - port->swept < 1.0) return;
  port->swept = port->now;
  sweep_peers(port);
  if (port->paused && port->listening) listen_to(port, true);
  for (Connection *one = port->connections; one; one = one->next) {
    bool silent = (!one->session || one->shaking) && port->now - one->since > PATIENCE;
    if (silent || (one->ending && port->now - one->since > LINGER)) {
      one->dead = true;
      mark_dirty(one);
    }
  }
}

/* Python's face */

static void work(Port *port, const struct epoll_event *events, int count) {
  for (int at = 0; at < count; at++) {
    void *source = events[at].data.ptr;
    if (source == port) {
      uint64_t ignored;
      if (read(port->wake, &ignored, sizeof ignored) < 0) continue;
    } else if (port->listeners <= (int *)source && (int *)source < port->listeners + port->listener_count) {
      if (port->listening) accept_from(port, *(int *)source);
    } else {
      Connection *connection = source;
      if (connection->dead) continue;
      bool shaking = connection->shaking; /* a handshake that waits for either goes on in receive() */
      if (events[at].events & EPOLLOUT) flush(connection);
      if (!connection->dead && (shaking || events[at].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) receive(connection);
    }
  }
}

static PyObject *news(Port *port) {
  PyObject *found = PyList_New(0);
  while (port->ready) {
    Call *call = port->ready;
    port->ready = call->next_ready;
    if (!port->ready) port->last_ready = NULL;
    call->ready = false;
    bool done = !call->connection && !(call->news & CLOSED); /* it was answered, and is over */
    if (done) drop_owner(call);
    if (!done && found && PyList_Append(found, (PyObject *)call)) Py_CLEAR(found);
    Py_DECREF((PyObject *)call);
  }
  return found;
}

/* Sleeps only if nothing comes at once, because waking up takes tens of microseconds, and finds cold caches. */
static int wait_for_events(int epoll, struct epoll_event *events, double timeout) {
  double until = clock_now() + (timeout < AWAKE ? timeout : AWAKE);
  do {
    int count = epoll_wait(epoll, events, MOST_EVENTS, 0);
    if (count) return count;
    sched_yield(); /* whoever has work for this core comes first */
  } while (clock_now() < until);
  return epoll_wait(epoll, events, MOST_EVENTS, timeout > 1 ? 1000 : (int)ceil(timeout * 1000));
}

static PyObject *port_poll(PyObject *self, PyObject *arguments) {
  Port *port = (Port *)self;
  double timeout;
  if (!PyArg_ParseTuple(arguments, "d", &timeout)) return NULL;
  if (port->epoll < 0) return PyList_New(0);
  port->thread = PyThread_get_thread_ident();
  port->inside = true;
  flush_dirty(port);
  port->inside = false;
  give_back(port);
  drop_closed(port);
  struct epoll_event events[MOST_EVENTS];
  int count = epoll_wait(port->epoll, events, MOST_EVENTS, 0);
  if (!count && !port->ready && timeout > 0) {
    int epoll = port->epoll;
    port->thread = 0; /* others send at once */
    Py_BEGIN_ALLOW_THREADS;
    count = wait_for_events(epoll, events, timeout);
    Py_END_ALLOW_THREADS;
    port->thread = PyThread_get_thread_ident();
    if (port->epoll < 0) return PyList_New(0);
  }
  port->now = clock_now();
  port->inside = true;
  work(port, events, count);
  sweep(port);
  flush_dirty(port);
  port->inside = false;
  give_back(port);
  drop_closed(port);
  return news(port);
}

static PyObject *port_wake(PyObject *self, PyObject *unused) {
  (void)unused;
  uint64_t one = 1;
  Port *port = (Port *)self;
  if (port->epoll >= 0 && write(port->wake, &one, sizeof one) < 0) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_NONE;
}

static PyObject *port_leave(PyObject *self, PyObject *unused) {
  (void)unused;
  Port *port = (Port *)self;
  if (port->going_away) Py_RETURN_NONE;
  port->going_away = true;
  for (Connection *one = port->connections; one; one = one->next) go_away(one);
  return port_wake(self, NULL);
}

static void close_listeners(Port *port) {
  port->listening = false;
  for (size_t at = 0; at < port->listener_count; at++) {
    if (port->listeners[at] >= 0) close(port->listeners[at]);
    port->listeners[at] = -1;
  }
}

static PyObject *port_refuse(PyObject *self, PyObject *unused) {
  (void)unused;
  close_listeners((Port *)self);
  Py_RETURN_NONE;
}

static void close_all(Port *port) {
  if (port->epoll < 0) return;
  port->inside = true;
  while (port->connections) {
    port->connections->dirty = false;
    free_connection(port->connections);
  }
  port->dirty = NULL;
  port->inside = false;
  close_listeners(port);
  close(port->epoll);
  close(port->wake);
  port->epoll = port->wake = -1;
  give_back(port);
  drop_closed(port);
}

static PyObject *port_close(PyObject *self, PyObject *unused) {
  (void)unused;
  close_all((Port *)self);
  return news((Port *)self);
}

static PyObject *port_counts(PyObject *self, PyObject *unused) {
  (void)unused;
  Port *port = (Port *)self;
  unsigned long long connections = 0, unsent = 0;
  for (Connection *one = port->connections; one; one = one->next) connections++, unsent += one->out_len > one->out_at;
  PyObject *floods = PyDict_New();
  for (int kind = 0; floods && kind < KINDS; kind++) {
    PyObject *count = PyLong_FromUnsignedLongLong(port->floods[kind]);
    if (!count || PyDict_SetItemString(floods, KIND_NAMES[kind], count)) Py_CLEAR(floods);
    Py_XDECREF(count);
  }
  if (!floods) return NULL;
  return Py_BuildValue("{s:K,s:K,s:K,s:K,s:n,s:n,s:K,s:N}", "calls", (unsigned long long)port->calls, "accepted",
                       (unsigned long long)port->accepted, "refused", (unsigned long long)port->refused, "connections",
                       connections, "open", (Py_ssize_t)port->open, "counted", (Py_ssize_t)port->counted, "unsent",
                       unsent, "floods", floods);
}

static PyObject *port_open(PyObject *self, void *unused) {
  return (void)unused, PyLong_FromSize_t(((Port *)self)->open);
}

static PyObject *port_counted(PyObject *self, void *unused) {
  return (void)unused, PyLong_FromSize_t(((Port *)self)->counted);
}

static PyObject *port_certify(PyObject *self, PyObject *arguments) {
  const char *certificate, *key, *client_ca;
  char why[256] = "";
  if (!PyArg_ParseTuple(arguments, "ssz", &certificate, &key, &client_ca)) return NULL;
  if (tls_use((Port *)self, certificate, key, client_ca, why, sizeof why)) {
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
  }
  Py_RETURN_NONE;
}

static int read_listeners(Port *port, PyObject *given) {
  Py_ssize_t count = PyTuple_Size(given);
  port->listeners = calloc((size_t)count + 1, sizeof *port->listeners);
  if (!port->listeners) return -1;
  for (Py_ssize_t at = 0; at < count; at++) {
    long fd = PyLong_AsLong(PyTuple_GetItem(given, at));
    if (fd < 0) return -1;
    port->listeners[at] = (int)fd;
    port->listener_count++;
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = &port->listeners[at]}};
    if (epoll_ctl(port->epoll, EPOLL_CTL_ADD, (int)fd, &event)) {
      PyErr_SetFromErrno(PyExc_OSError);
      return -1;
    }
  }
  port->listening = true;
  return 0;
}

static PyObject *port_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  static char *keywords[] = {"listeners", "message", "partial", "headers", "streams", "resets", "per_address", NULL};
  PyObject *listeners;
  Py_ssize_t message, partial, headers;
  unsigned streams, per_address;
  double resets;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "O!nnnIdI", keywords, &PyTuple_Type, &listeners, &message,
                                   &partial, &headers, &streams, &resets, &per_address))
    return NULL;
  Port *port = (Port *)PyType_GenericAlloc(type, 0);
  if (!port) return NULL;
  port->limits = (Limits){(size_t)message, (size_t)partial, (size_t)headers, streams, resets, per_address};
  port->now = clock_now();
  port->epoll = epoll_create1(EPOLL_CLOEXEC);
  port->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = port}};
  if (port->epoll < 0 || port->wake < 0 || epoll_ctl(port->epoll, EPOLL_CTL_ADD, port->wake, &event))
    PyErr_SetFromErrno(PyExc_OSError);
  else if (make_callbacks(port))
    PyErr_NoMemory();
  else if (!read_listeners(port, listeners))
    return (PyObject *)port;
  else if (!PyErr_Occurred())
    PyErr_SetString(PyExc_ValueError, "the listeners have to be file descriptors");
  Py_DECREF((PyObject *)port);
  return NULL;
}

static void port_free(PyObject *self) {
  Port *port = (Port *)self;
  PyTypeObject *type = Py_TYPE(self);
  close_all(port);
  for (size_t at = 0; at < PEER_ROWS; at++) {
    while (port->peers[at]) {
      Peer *peer = port->peers[at];
      port->peers[at] = peer->next;
      free(peer);
    }
  }
  tls_forget(port);
  nghttp2_session_callbacks_del(port->callbacks);
  nghttp2_option_del(port->option_set);
  free(port->listeners);
  freefunc release = PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

PyMODINIT_FUNC PyInit_accel_port(void);

PyMODINIT_FUNC PyInit_accel_port(void) {
  static PyMethodDef methods[] = {
      {"poll", port_poll, METH_VARARGS, "Waits some seconds for news, and returns the calls that have news."},
      {"wake", port_wake, METH_NOARGS, "Ends the wait of the other thread that waits for news."},
      {"leave", port_leave, METH_NOARGS, "Tells all clients to open no further calls."},
      {"refuse", port_refuse, METH_NOARGS, "Takes no further connections."},
      {"close", port_close, METH_NOARGS, "Closes all connections, and returns the calls that have news."},
      {"counts", port_counts, METH_NOARGS, "Returns what the port has counted."},
      {"certify", port_certify, METH_VARARGS, "Uses a certificate, its key and the CA of clients, or None."},
      {NULL, NULL, 0, NULL},
  };
  static PyGetSetDef members[] = {
      {"open", port_open, NULL, "The calls that are open.", NULL},
      {"counted", port_counted, NULL, "The open calls that are counted.", NULL},
      {NULL, NULL, NULL, NULL, NULL},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, port_new},       {Py_tp_dealloc, port_free}, {Py_tp_methods, methods},
      {Py_tp_getset, members}, {Py_tp_doc, "A port."},     {0, NULL},
  };
  static PyType_Spec spec = {"accel_port.Port", sizeof(Port), 0, Py_TPFLAGS_DEFAULT, slots};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "accel_port", .m_size = -1};
  PyObject *module = PyModule_Create(&definition);
  if (!module) return NULL;
  PyObject *type = PyType_FromSpec(&spec);
  static const struct { const char *name; long value; } numbers[] = {
      {"OPENED", OPENED}, {"MESSAGE", MESSAGE}, {"ENDED", ENDED}, {"CLOSED", CLOSED}, {"DRAINED", DRAINED},
  };
  bool failed = !type || PyModule_AddObject(module, "Port", type) || make_call_type(module);
  for (size_t at = 0; !failed && at < sizeof numbers / sizeof *numbers; at++)
    failed = PyModule_AddIntConstant(module, numbers[at].name, numbers[at].value);
  failed = failed || PyModule_AddStringConstant(module, "nghttp2", nghttp2_version(0)->version_str);
  if (!failed) return module;
  Py_DECREF(module);
  return NULL;
}
