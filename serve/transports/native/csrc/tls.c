/* TLS by OpenSSL, with HTTP/2 as the only protocol. */
#include "port.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <string.h>
#include <sys/epoll.h>

static int choose_protocol(SSL *tls, const unsigned char **chosen, unsigned char *len, const unsigned char *offered,
                           unsigned offered_len, void *data) {
  (void)tls, (void)data;
  for (unsigned at = 0; at < offered_len; at += 1u + offered[at]) {
    if (offered[at] == 2 && at + 2 < offered_len && !memcmp(offered + at + 1, "h2", 2)) {
      *chosen = offered + at + 1;
      *len = 2;
      return SSL_TLSEXT_ERR_OK;
    }
  }
  return SSL_TLSEXT_ERR_ALERT_FATAL;
}

static int fail(SSL_CTX *made, char *why, size_t why_len) {
  ERR_error_string_n(ERR_get_error(), why, why_len);
  ERR_clear_error();
  SSL_CTX_free(made);
  return -1;
}

/* Uses the PEM files for new connections. Returns -1, and the reason in ``why``, if they can't be used. */
int tls_use(Port *port, const char *certificate, const char *key, const char *client_ca, char *why, size_t why_len) {
  SSL_CTX *made = SSL_CTX_new(TLS_server_method());
  if (!made) return fail(NULL, why, why_len);
  SSL_CTX_set_min_proto_version(made, TLS1_2_VERSION);
  SSL_CTX_set_options(made, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_mode(made, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_alpn_select_cb(made, choose_protocol, NULL);
  static const unsigned char name[] = "accel";
  SSL_CTX_set_session_id_context(made, name, sizeof name - 1);
  if (SSL_CTX_use_certificate_chain_file(made, certificate) != 1 ||
      SSL_CTX_use_PrivateKey_file(made, key, SSL_FILETYPE_PEM) != 1 || SSL_CTX_check_private_key(made) != 1)
    return fail(made, why, why_len);
  if (client_ca) {
    STACK_OF(X509_NAME) *names = SSL_load_client_CA_file(client_ca);
    if (!names || SSL_CTX_load_verify_locations(made, client_ca, NULL) != 1) return fail(made, why, why_len);
    SSL_CTX_set_client_CA_list(made, names);
    SSL_CTX_set_verify(made, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
  }
  tls_forget(port);
  port->tls = made;
  return 0;
}

void tls_forget(Port *port) {
  SSL_CTX_free(port->tls);
  port->tls = NULL;
}

int tls_open(Connection *connection) {
  SSL *made = SSL_new(connection->port->tls);
  if (!made) return -1;
  connection->tls = made;
  connection->shaking = true;
  if (SSL_set_fd(made, connection->fd) != 1) return -1;
  SSL_set_accept_state(made);
  return 0;
}

/* Returns 1 once the handshake is over, 0 if it waits, and -1 if it failed. */
int tls_shake(Connection *connection) {
  ERR_clear_error();
  int done = SSL_do_handshake(connection->tls);
  if (done == 1) {
    const unsigned char *protocol;
    unsigned len;
    SSL_get0_alpn_selected(connection->tls, &protocol, &len);
    wait_for(connection, true, false);
    return len ? 1 : -1; /* a client without ALPN doesn't speak HTTP/2 */
  }
  int reason = SSL_get_error(connection->tls, done);
  ERR_clear_error();
  if (reason == SSL_ERROR_WANT_WRITE) return wait_for(connection, false, true), 0;
  if (reason == SSL_ERROR_WANT_READ) return wait_for(connection, true, false), 0;
  return -1;
}

static ssize_t result(Connection *connection, int done) {
  if (done > 0) return done;
  int reason = SSL_get_error(connection->tls, done);
  ERR_clear_error();
  if (reason == SSL_ERROR_ZERO_RETURN) return 0;
  errno = reason == SSL_ERROR_WANT_READ || reason == SSL_ERROR_WANT_WRITE ? EAGAIN : EPROTO;
  return -1;
}

ssize_t tls_recv(Connection *connection, void *into, size_t len) {
  ERR_clear_error();
  return result(connection, SSL_read(connection->tls, into, len > INT32_MAX ? INT32_MAX : (int)len));
}

ssize_t tls_send(Connection *connection, const void *from, size_t len) {
  ERR_clear_error();
  return result(connection, SSL_write(connection->tls, from, len > INT32_MAX ? INT32_MAX : (int)len));
}

void tls_close(Connection *connection) {
  SSL_free(connection->tls);
  connection->tls = NULL;
}
