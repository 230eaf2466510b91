"""Make the profile that comes with the package from one that `trimmoe calibrate` made.

    trimmoe calibrate embedded -o profile.trim
    python tools/pack_profile.py profile.trim

The profile must be of the embedded model as it is built now.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trimmoe.core.profile import load_profile
from trimmoe.models.embedded import ensure_embedded_model
from trimmoe.models.embedded.shipped import SHIPPED_PATH, pack_profile
from trimmoe.models.load import model_spec


def main() -> None:
    parser = argparse.ArgumentParser(description="Ship a profile with the package.")
    parser.add_argument("profile", type=Path)
    parser.add_argument("--output", type=Path, default=SHIPPED_PATH)
    asked = parser.parse_args()
    spec = model_spec(ensure_embedded_model(), hashed=True)
    load_profile(asked.profile).require_model(spec)
    pack_profile(asked.profile, asked.output)
    print(f"Wrote {asked.output}, {asked.output.stat().st_size / 1e6:.1f} MB.")


if __name__ == "__main__":
    main()
