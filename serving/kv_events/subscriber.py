"""Follows the events of one data rank of a worker over ZMQ."""

import logging
import threading
import time
from dataclasses import dataclass
from socket import socketpair
from typing import Any

from serving.kv_events.follower import Deliver, Follower
from serving.kv_events.sockets import Endpoint, new_socket, zmq_module
from serving.kv_events.wire import sequence_bytes

# A replay that says nothing for so long is asked for again, one that is of no use after a while.
_ANSWER_S = 20.0
_RETRY_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """next: number of the message that is expected, None while nothing is known of the publisher.
    gaps: found in what was published; malformed: messages.
    """

    next: int | None
    gaps: int
    malformed: int


class Subscriber:
    """Delivers the events of a publisher from the first on, on a thread of its own.

    What was lost is asked for again, and so is everything whenever the connection was: then Cleared
    comes first. While a worker cannot be reached nothing of it is known, and nothing is raised.
    """

    def __init__(
        self,
        events: str,
        replay: str,
        deliver: Deliver,
        *,
        page_size: int,
        rank: int = 0,
        quiet_s: float = 2.0,
    ):
        """events, replay: endpoints of the data rank ``rank``. deliver: gets the events of a
        message, in order, on the subscriber's thread. quiet_s: after so long without a message it
        asks whether one was lost. UserError without pyzmq or for an endpoint that is none.
        """
        for address in (events, replay):
            Endpoint.parse(address, "kv events:")
        self._zmq = zmq_module()
        self._events, self._replay, self._quiet_s = events, replay, quiet_s
        self._follower = Follower(deliver, rank=rank, page_size=page_size, name=events)
        self._live = self._connected("SUB", events)
        self._live.subscribe(b"")
        self._lost = self._live.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)
        self._stop, self._stopped = socketpair()
        self._thread = threading.Thread(
            target=self._guarded, name=f"kv-events {events}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; nothing is delivered afterwards."""
        self._stop.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._live.disable_monitor()
        self._lost.close()
        self._live.close()
        self._stopped.close()

    @property
    def progress(self) -> Progress:
        follower = self._follower
        return Progress(follower.next, follower.gaps, follower.malformed)

    def _connected(self, kind: str, address: str) -> Any:
        sock = new_socket(kind, address)
        sock.reconnect_ivl, sock.reconnect_ivl_max = 50, 1000
        sock.connect(address)
        return sock

    def _guarded(self) -> None:
        """After a fault everything is asked for anew."""
        going = True
        while going:
            try:
                self._follower.forget()
                self._run()
                going = False
            except Exception:
                _log.exception("kv events of %s: a fault, they are asked for anew", self._events)
                going = not self._stopped_within(_RETRY_S)

    def _run(self) -> None:
        poller = self._zmq.Poller()
        for source in (self._live, self._lost, self._stopped):
            poller.register(source, self._zmq.POLLIN)
        going = True
        while going:
            if self._follower.next is None:
                going = self._catch_up()
                if going and self._follower.next is None:
                    going = not self._stopped_within(_RETRY_S)
                continue
            ready = dict(poller.poll(1e3 * self._quiet_s))
            if self._stopped.fileno() in ready:
                return
            if self._lost in ready:
                self._lost.recv_multipart()
                self._follower.forget()
            elif self._live in ready:
                frames = self._live.recv_multipart()
                if not self._follower.live(frames):
                    going = self._catch_up()
                    self._follower.live(frames)
            else:
                going = self._catch_up()

    def _stopped_within(self, seconds: float) -> bool:
        poller = self._zmq.Poller()
        poller.register(self._stopped, self._zmq.POLLIN)
        return bool(poller.poll(1e3 * seconds))

    def _catch_up(self) -> bool:
        """Replay what is missing; False if the subscriber was closed meanwhile."""
        asked = self._connected("DEALER", self._replay)
        poller = self._zmq.Poller()
        for source in (asked, self._stopped):
            poller.register(source, self._zmq.POLLIN)
        try:
            asked.send_multipart([b"", sequence_bytes(self._follower.ask())])
            until = time.monotonic() + _ANSWER_S
            while (left := until - time.monotonic()) > 0:
                ready = dict(poller.poll(1e3 * left))
                if self._stopped.fileno() in ready:
                    return False
                if asked in ready:
                    if self._follower.replayed(asked.recv_multipart()):
                        return True
                    until = time.monotonic() + _ANSWER_S
            self._follower.forget()
            return True
        finally:
            asked.close()
