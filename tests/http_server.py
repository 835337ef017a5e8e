"""A small HTTP server in a thread, for tests of clients."""

import contextlib
import http.server
import threading


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with texts, and prints nothing."""

    def log_message(self, *_):
        pass

    def answer(self, content: str, status: int = 200):
        data = content.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serving(handler, **attributes):
    """A server of the handler at its `url`; attributes are the server's, for the handler's use."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        for name, value in attributes.items():
            setattr(server, name, value)
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
