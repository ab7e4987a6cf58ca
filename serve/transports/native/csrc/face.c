/* What Python sees of a call. */
#include "port.h"

#include <string.h>

static PyObject *call_send(PyObject *self, PyObject *parts) {
  Call *call = (Call *)self;
  if (!call->connection || call->answered) Py_RETURN_FALSE;
  if (!queue_message(call, parts)) return NULL;
  submit_answer(call);
  push(call);
  Py_RETURN_TRUE;
}

static PyObject *call_finish(PyObject *self, PyObject *arguments) {
  Call *call = (Call *)self;
  int status;
  const char *text;
  Py_ssize_t len;
  PyObject *parts = NULL;
  if (!PyArg_ParseTuple(arguments, "iy#|O!", &status, &text, &len, &PyTuple_Type, &parts)) return NULL;
  if (status < 0 || status > 16) {
    PyErr_SetString(PyExc_ValueError, "the status has to be from 0 to 16");
    return NULL;
  }
  if (!call->connection || call->answered) Py_RETURN_FALSE;
  if (parts && !queue_message(call, parts)) return NULL;
  call->answered = call->finishing = true;
  call->status = status;
  if (len && (call->text = malloc((size_t)len))) {
    memcpy(call->text, text, (size_t)len);
    call->text_len = (size_t)len;
  }
  submit_answer(call);
  go_on(call);
  if (call->connection) push(call); /* go_on may have sent everything, and the call is over */
  Py_RETURN_TRUE;
}

static PyObject *call_accept(PyObject *self, PyObject *unused) {
  (void)unused;
  ((Call *)self)->accepted = true;
  go_on((Call *)self);
  Py_RETURN_NONE;
}

static PyObject *call_news(PyObject *self, PyObject *unused) {
  (void)unused;
  Call *call = (Call *)self;
  unsigned news = call->news;
  call->news = 0;
  return PyLong_FromUnsignedLong(news);
}

static PyObject *call_take(PyObject *self, PyObject *unused) {
  (void)unused;
  Call *call = (Call *)self;
  Message *found = call->messages;
  if (!found) Py_RETURN_NONE;
  call->messages = found->next;
  PyObject *bytes = found->bytes;
  bool packed = found->packed;
  free(found);
  call->held -= (size_t)PyBytes_Size(bytes);
  go_on(call);
  return packed ? Py_BuildValue("(N)", bytes) : bytes;
}

static PyObject *call_header(PyObject *self, PyObject *wanted) {
  Call *call = (Call *)self;
  char *name;
  Py_ssize_t name_len;
  if (PyBytes_AsStringAndSize(wanted, &name, &name_len)) return NULL;
  for (size_t at = 0; at < call->headers_len;) {
    uint32_t lengths[2];
    memcpy(lengths, call->headers + at, sizeof lengths);
    at += sizeof lengths;
    if (lengths[0] == (size_t)name_len && !memcmp(call->headers + at, name, lengths[0]))
      return PyBytes_FromStringAndSize(call->headers + at + lengths[0], (Py_ssize_t)lengths[1]);
    at += lengths[0] + lengths[1];
  }
  Py_RETURN_NONE;
}

static PyObject *call_headers(PyObject *self, void *unused) {
  (void)unused;
  Call *call = (Call *)self;
  PyObject *found = PyList_New(0);
  for (size_t at = 0; found && at < call->headers_len;) {
    uint32_t lengths[2];
    memcpy(lengths, call->headers + at, sizeof lengths);
    at += sizeof lengths;
    PyObject *pair = Py_BuildValue("(y#y#)", call->headers + at, (Py_ssize_t)lengths[0],
                                   call->headers + at + lengths[0], (Py_ssize_t)lengths[1]);
    if (!pair || PyList_Append(found, pair)) Py_CLEAR(found);
    Py_XDECREF(pair);
    at += lengths[0] + lengths[1];
  }
  return found;
}

static PyObject *kept(PyObject *found) {
  if (!found) Py_RETURN_NONE;
  Py_INCREF(found);
  return found;
}

static PyObject *call_path(PyObject *self, void *unused) { return (void)unused, kept(((Call *)self)->path); }
static PyObject *call_encoding(PyObject *self, void *unused) { return (void)unused, kept(((Call *)self)->encoding); }
static PyObject *call_owner(PyObject *self, void *unused) { return (void)unused, kept(((Call *)self)->owner); }

static int set_owner(PyObject *self, PyObject *owner, void *unused) {
  (void)unused;
  Call *call = (Call *)self;
  PyObject *before = call->owner;
  Py_XINCREF(owner);
  call->owner = owner;
  Py_XDECREF(before);
  return 0;
}

static PyObject *call_deadline(PyObject *self, void *unused) {
  return (void)unused, PyFloat_FromDouble(((Call *)self)->deadline);
}

static PyObject *call_queued(PyObject *self, void *unused) {
  Call *call = (Call *)self;
  (void)unused;
  call->told_full = call->queued > DRAINED_AT; /* who asks is told when less is left */
  return PyLong_FromSize_t(call->queued);
}

static PyObject *call_counted(PyObject *self, void *unused) {
  return (void)unused, PyBool_FromLong(((Call *)self)->counted);
}

static int set_counted(PyObject *self, PyObject *value, void *unused) {
  (void)unused;
  Call *call = (Call *)self;
  int counted = value ? PyObject_IsTrue(value) : -1;
  if (counted < 0) return -1;
  if (call->connection && counted != call->counted) call->port->counted += counted ? 1 : (size_t)-1;
  call->counted = counted;
  return 0;
}

static void call_free(PyObject *self) {
  Call *call = (Call *)self;
  PyTypeObject *type = Py_TYPE(self);
  Py_CLEAR(call->owner);
  Py_CLEAR(call->path);
  Py_CLEAR(call->encoding);
  Py_CLEAR(call->partial);
  for (Message *message; (message = call->messages);) {
    call->messages = message->next;
    Py_DECREF(message->bytes);
    free(message);
  }
  free(call->headers);
  free(call->text);
  Py_DECREF((PyObject *)call->port);
  freefunc release = PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

PyTypeObject *call_type;

int make_call_type(PyObject *module) {
  static PyMethodDef methods[] = {
      {"accept", call_accept, METH_NOARGS, "Lets the client send a message that is not here yet."},
      {"news", call_news, METH_NOARGS, "Returns what is new since the last call of this method."},
      {"take", call_take, METH_NOARGS,
       "Returns the next message, or None. A compressed message is alone in a tuple."},
      {"header", call_header, METH_O, "Returns the value of a header, or None."},
      {"send", call_send, METH_VARARGS, "Sends a message, whose parts are the arguments."},
      {"finish", call_finish, METH_VARARGS,
       "Ends the call with a status and its percent-encoded text, after a message whose parts are in a tuple."},
      {NULL, NULL, 0, NULL},
  };
  static PyGetSetDef members[] = {
      {"path", call_path, NULL, "The method that is called.", NULL},
      {"encoding", call_encoding, NULL, "The name of the compression of the messages, or None.", NULL},
      {"headers", call_headers, NULL, "The other headers.", NULL},
      {"owner", call_owner, set_owner, "Any object; released at the end of the call.", NULL},
      {"deadline", call_deadline, NULL, "Of time.monotonic(), or infinite.", NULL},
      {"queued", call_queued, NULL, "Bytes that were not sent yet.", NULL},
      {"counted", call_counted, set_counted, "Whether Port.counted counts the call.", NULL},
      {NULL, NULL, NULL, NULL, NULL},
  };
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, call_free},
      {Py_tp_methods, methods},
      {Py_tp_getset, members},
      {Py_tp_doc, "One call."},
      {0, NULL},
  };
  static PyType_Spec spec = {
      "accel_port.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots,
  };
  call_type = (PyTypeObject *)PyType_FromSpec(&spec);
  if (!call_type) return -1;
  Py_INCREF((PyObject *)call_type);
  return PyModule_AddObject(module, "Call", (PyObject *)call_type);
}
