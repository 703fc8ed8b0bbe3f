"""Bodies of payloads on their way in: stored once a month, looked up and written together."""

from provenance.facts import BLOB, Payload
from provenance.store import blobs, codec, tables
from provenance.store.rows import BODY, Bulk, Rows


class Bodies:
    """The bodies of one transaction: asked for while records come, looked up and stored together."""

    def __init__(self, bulk: Bulk, rows: Rows) -> None:
        self.bulk, self.rows = bulk, rows
        self.wanted: dict[tuple[bytes, int], Payload] = {}
        self.numbers: dict[tuple[bytes, int], int] = {}
        self._next = 0
        self._tool = codec.compressor()

    def want(self, key: bytes, month: int, payload: Payload) -> tuple[bytes, int]:
        """Ask for a body; what is returned stands in its reference until `settle` has given it a number."""
        place = (key, month)
        if place not in self.numbers:
            self.wanted.setdefault(place, payload)
        return place

    def settle(self) -> None:
        """Find or store every body that was asked for, and put the numbers into the references."""
        if self.wanted:
            found = self.bulk.among("select key, month, id from payloads where key", [key for key, _ in self.wanted])
            for key, month, number in found:
                self.numbers[bytes(key), month] = number
            self._store([place for place in self.wanted if place not in self.numbers])
            self.wanted.clear()
        for ref in self.rows.refs:
            if ref[BODY] is not None:
                ref[BODY] = self.numbers[ref[BODY]]

    def _store(self, fresh: list[tuple[bytes, int]]) -> None:
        if not fresh:
            return
        if not self._next:
            self._next = int(self.bulk.run("select coalesce(max(id), 0) + 1 from payloads")[0][0])
        made = []
        for place in fresh:
            payload = self.wanted[place]
            if payload.encoding & BLOB:
                kind, data = codec.BLOB, blobs.keep(self.bulk, payload.data)
            else:
                kind, data = codec.pack(payload.data, payload.encoding, self._tool)
            made.append((self._next, place[1], place[0], kind, len(payload.data), data))
            self.numbers[place] = self._next
            self._next += 1
        self.bulk.insert(tables.payloads, made)
