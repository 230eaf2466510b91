"""What was compiled from other sources is not run.

Numba keeps what it compiles beside the file of a function and looks at that file alone. What the
function calls, and constants, are compiled into it from other files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def forget_outdated(folder: Path, *sources: Path) -> None:
    """Delete what is kept for a folder if it was compiled from anything but these files, and those
    in these folders."""
    files = [file for each in sources for file in ([each] if each.is_file() else each.glob("*.py"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()
    stamp = folder / "__pycache__" / "compiled-from"
    try:
        if stamp.exists() and stamp.read_text() == digest:
            return
        for file in stamp.parent.glob("*.nb[ic]"):
            file.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest)
    except OSError:
        # An installation that cannot be written to is not edited either.
        return
