/* Sends ModelInfer calls at random times (a Poisson process), whether earlier calls have an answer or not.
 *
 * Usage: serve_arrivals PORT BODY RATE SECONDS CONNECTIONS
 *
 * BODY is a file with the length-prefixed message. Each call goes to a random connection to 127.0.0.1. Prints the
 * latencies in microseconds, one a line, in order of the answers. A latency counts from the time at which the call was
 * due, so that neither a late client nor a full window of HTTP/2 hides a wait. Ends with status 1 and a reason on
 * stderr if a call was reset or has no answer after 5 s. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST_OPEN 65536   /* calls of a connection */
#define MOST_BODY 60000   /* bytes: no more than the first window of a stream */
#define FRAME 16384
#define PATIENCE 5.0 /* seconds */
enum { DATA, HEADERS, RESET = 3, SETTINGS, GO_AWAY = 7, WINDOW_UPDATE };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4 };

typedef struct {
  int fd;
  uint32_t due_count, sent_count; /* call number k has the stream 2k + 1 */
  double due[MOST_OPEN];
  int64_t credit, taken;
  unsigned char in[1 << 16];
  size_t have;
} Connection;

static unsigned char body[MOST_BODY], headers[512], out[2 * MOST_BODY];
static size_t body_len, headers_len, answered;

static void fail(const char *why) {
  fprintf(stderr, "%s\n", why);
  exit(1);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static uint32_t number(const unsigned char *from) {
  return (uint32_t)from[0] << 24 | (uint32_t)from[1] << 16 | (uint32_t)from[2] << 8 | from[3];
}

static unsigned char *put_number(unsigned char *at, uint32_t value) {
  at[0] = value >> 24, at[1] = value >> 16, at[2] = value >> 8, at[3] = value;
  return at + 4;
}

static unsigned char *put_frame(unsigned char *at, size_t len, int kind, int flags, uint32_t stream) {
  put_number(at, (uint32_t)len << 8 | (uint32_t)kind);
  at[4] = flags;
  return put_number(at + 5, stream);
}

static void put_header(const char *name, const char *value) { /* a literal that isn't indexed */
  headers_len += (size_t)sprintf((char *)headers + headers_len, "%c%c%s%c%s", 0, (int)strlen(name), name,
                                 (int)strlen(value), value);
}

static void write_all(Connection *one, const unsigned char *from, size_t len) {
  while (len) {
    ssize_t count = write(one->fd, from, len);
    if (count < 0 && errno != EAGAIN) fail("the server closed a connection");
    if (count > 0) from += count, len -= (size_t)count;
  }
}

static void send_due(Connection *one) {
  while (one->sent_count < one->due_count && one->credit >= (int64_t)body_len) {
    uint32_t stream = 2 * one->sent_count++ + 1;
    unsigned char *at = put_frame(out, headers_len, HEADERS, END_HEADERS, stream);
    at = (unsigned char *)memcpy(at, headers, headers_len) + headers_len;
    for (size_t from = 0; from < body_len;) {
      size_t len = body_len - from < FRAME ? body_len - from : FRAME;
      at = put_frame(at, len, DATA, from + len == body_len ? END_STREAM : 0, stream);
      at = (unsigned char *)memcpy(at, body + from, len) + len;
      from += len;
    }
    one->credit -= (int64_t)body_len;
    write_all(one, out, (size_t)(at - out));
  }
}

static void take_frame(Connection *one, const unsigned char *frame, size_t len) {
  int kind = frame[3], flags = frame[4];
  uint32_t stream = number(frame + 5) & 0x7fffffff;
  unsigned char reply[13];
  if (kind == RESET || kind == GO_AWAY) fail("the server reset a call or ended a connection");
  if (kind == SETTINGS && !(flags & ACK)) write_all(one, reply, (size_t)(put_frame(reply, 0, SETTINGS, ACK, 0) - reply));
  if (kind == WINDOW_UPDATE && !stream) one->credit += number(frame + 9);
  if (kind == DATA) one->taken += (int64_t)len;
  if ((kind == DATA || kind == HEADERS) && flags & END_STREAM) {
    answered++;
    printf("%.1f\n", 1e6 * (now() - one->due[stream / 2 % MOST_OPEN]));
  }
  if (one->taken > 1 << 14) {
    put_number(put_frame(reply, 4, WINDOW_UPDATE, 0, 0), (uint32_t)one->taken);
    write_all(one, reply, sizeof reply);
    one->taken = 0;
  }
}

static void receive(Connection *one) {
  for (;;) {
    ssize_t count = recv(one->fd, one->in + one->have, sizeof one->in - one->have, MSG_DONTWAIT);
    if (count < 0 && errno == EAGAIN) break;
    if (count <= 0) fail("the server closed a connection");
    one->have += (size_t)count;
    size_t at = 0, len;
    for (; one->have - at >= 9; at += 9 + len) {
      len = number(one->in + at) >> 8;
      if (one->have - at < 9 + len) break;
      take_frame(one, one->in + at, len);
    }
    memmove(one->in, one->in + at, one->have -= at);
  }
  send_due(one);
}

static void open_connection(Connection *one, int port, int epoll) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  one->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(one->fd, (struct sockaddr *)&to, sizeof to)) fail("can't connect");
  int yes = 1;
  setsockopt(one->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  fcntl(one->fd, F_SETFL, O_NONBLOCK);
  unsigned char opening[33] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  put_frame(opening + 24, 0, SETTINGS, 0, 0);
  write_all(one, opening, sizeof opening);
  one->credit = 65535;
  struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = one}};
  epoll_ctl(epoll, EPOLL_CTL_ADD, one->fd, &event);
}

int main(int argc, char **argv) {
  if (argc != 6) fail("usage: serve_arrivals PORT BODY RATE SECONDS CONNECTIONS");
  double rate = atof(argv[3]), seconds = atof(argv[4]);
  int count = atoi(argv[5]), epoll = epoll_create1(0);
  FILE *file = fopen(argv[2], "rb");
  if (!file || rate <= 0 || count < 1) fail("the body can't be read, or a number isn't positive");
  body_len = fread(body, 1, sizeof body, file);
  if (fgetc(file) != EOF) fail("the body is too large for the first window of a stream");
  headers[headers_len++] = 0x83, headers[headers_len++] = 0x86; /* POST, http */
  put_header(":path", "/inference.GRPCInferenceService/ModelInfer");
  put_header(":authority", "localhost");
  put_header("content-type", "application/grpc");
  put_header("te", "trailers");
  Connection *all = calloc((size_t)count, sizeof *all);
  for (int at = 0; all && at < count; at++) open_connection(all + at, atoi(argv[1]), epoll);
  double due = now(), end = due + seconds;
  size_t begun = 0;
  srand48(1);
  for (;;) {
    double time = now();
    for (; due <= time && due < end; due -= log(1 - drand48()) / rate, begun++) {
      Connection *one = all + (int)(drand48() * count);
      if (one->due_count - one->sent_count >= MOST_OPEN) fail("too many calls wait");
      one->due[one->due_count++ % MOST_OPEN] = due;
      send_due(one);
    }
    if (due >= end && answered == begun) return 0;
    if (time > end + PATIENCE) fail("calls have no answer");
    double wait = due < end ? due - now() : 0.1;
    struct timespec pause = {0, wait <= 0 ? 0 : wait < 0.1 ? (long)(1e9 * wait) : 100000000};
    struct epoll_event events[64];
    int found = epoll_pwait2(epoll, events, 64, &pause, NULL);
    for (int at = 0; at < found; at++) receive(events[at].data.ptr);
  }
}
