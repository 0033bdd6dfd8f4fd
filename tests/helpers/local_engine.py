"""An engine behind a channel, in a thread of the test, which can reach both ends."""

import threading
from multiprocessing import Pipe

from serve_spec.engine.build import build_engine
from serve_spec.engine.client import EngineClient
from serve_spec.engine.server import EngineServer


class LocalEngine(EngineClient):
    """A client with its server; `engine` is what the server runs.

    built: an engine to use instead of one that is built from the configuration.
    """

    def __init__(self, config, built=None):
        self.engine = built or build_engine(config)
        mine, theirs = Pipe()
        self.server = EngineServer(config, self.engine, theirs)
        self._thread = threading.Thread(target=self.server.run, name="engine", daemon=True)
        self._thread.start()
        super().__init__(config, mine)

    def shutdown(self):
        super().shutdown()
        self._thread.join()
