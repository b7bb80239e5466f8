"""Messages as a stream of bytes: each is its length and its content.

Knows nothing of what a message says.

Invariant: the contents come out as they went in, however the stream was cut.
"""

HEADER_BYTES = 4  # a frame's length, little-endian, before its content


def framed(content: bytes) -> bytes:
    """Return a frame."""
    return len(content).to_bytes(HEADER_BYTES, "little") + content


class FrameBuffer:
    """Cuts a stream of bytes into the contents of frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def push(self, received: bytes) -> list[bytes]:
        """Return the contents that became whole."""
        self._bytes += received
        contents, start = [], 0
        while len(self._bytes) - start >= HEADER_BYTES:
            first = start + HEADER_BYTES
            end = first + int.from_bytes(self._bytes[start:first], "little")
            if len(self._bytes) < end:
                break
            contents.append(bytes(self._bytes[first:end]))
            start = end
        del self._bytes[:start]
        return contents
