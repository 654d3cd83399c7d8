"""The process that tests links: it may hang or die, and its parent ends it. Run by `comm_pcie.selftest`.

It imports nothing of this project, and no torch: it loads the compiled test and calls it. Its standard input is one
JSON request; it answers with one JSON line before and after each test.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys


def main() -> None:
    """Run the tests of the request."""
    request = json.load(sys.stdin)
    library = ctypes.CDLL(request["library"])
    test = library.comm_pcie_selftest_v1
    test.restype, test.argtypes = ctypes.c_int, [ctypes.c_char_p]
    library.comm_last_error.restype = ctypes.c_char_p
    arguments, result = struct.Struct(request["arguments"]), struct.Struct(request["result"])
    seed = 1
    for number, (origin, target) in enumerate(request["pairs"]):
        for plane in request["planes"]:
            _say({"begin": [number, plane]})
            for words in request["words"]:
                seed += 1
                found = ctypes.create_string_buffer(result.size)
                uuids = (*struct.unpack("2Q", bytes.fromhex(origin)), *struct.unpack("2Q", bytes.fromhex(target)))
                packed = arguments.pack(
                    arguments.size,
                    request["abi"],
                    *uuids,
                    words,
                    int(request["timeout_s"] * 1e9),
                    ctypes.addressof(found),
                    plane,
                    seed,
                    request["spoil"],
                    0,
                )
                status = test(packed)
                error = (library.comm_last_error() or b"").decode(errors="replace") if status else ""
                _, _, wrong, first, came = result.unpack(found.raw)
                _say(
                    {
                        "end": [number, plane],
                        "words": words,
                        "status": status,
                        "error": error,
                        "wrong": wrong,
                        "first": first,
                        "came": came,
                    }
                )
    _say({"over": True})


def _say(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
