"""Hand-made safetensors bytes."""

import json


def container(header, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def f32(*offsets: int, **changes) -> dict:
    start, end = offsets
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end], **changes}
