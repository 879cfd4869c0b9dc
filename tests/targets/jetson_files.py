"""Files as a Jetson shows them, under a root directory of a test's own."""

from __future__ import annotations

from pathlib import Path

from mptune.targets.detect import JetsonState, PowerMode

CONF = """# FILE TYPE
< PARAM TYPE=CLOCK NAME=GPU >
MAX_FREQ /sys/class/devfreq/17000000.gpu/max_freq
< POWER_MODEL ID=0 NAME=15W >
GPU MAX_FREQ 612000000
< POWER_MODEL ID=1 NAME=25W >
GPU MAX_FREQ 918000000
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
GPU MAX_FREQ -1
< PM_CONFIG DEFAULT=1 >
"""

DPKG = """Package: nvidia-l4t-core
Version: 36.4.3-20250107174145

Package: nvidia-jetpack
Status: install ok installed
Version: 6.2+b77

Package: zlib1g
Version: 1:1.2.11
"""

ORIN_NANO_SUPER = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0",
    "proc/meminfo": "MemTotal:        7650336 kB\nMemAvailable:    5123456 kB\n",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, "
    "DATE: Wed Jan  8 01:49:37 UTC 2025\n",
    "etc/nvpmodel.conf": CONF,
    "var/lib/nvpmodel/status": "pmode:0002 fmode:quiet\n",
    "var/lib/dpkg/status": DPKG,
    "sys/class/devfreq/17000000.gpu/cur_freq": "306000000\n",
    "sys/class/devfreq/17000000.gpu/min_freq": "306000000\n",
    "sys/class/devfreq/17000000.gpu/max_freq": "1020000000\n",
    "sys/class/devfreq/15340000.vic/max_freq": "435200000\n",
    "sys/devices/platform/gpu.0/tpc_pg_mask": "240\n",
    "sys/kernel/nvpmodel_clk_cap/emc": "3199000000\n",
    "sys/kernel/debug/bpmp/debug/clk/emc/rate": "3199000000\n",
}
"""An Orin Nano developer kit with JetPack 6.2 in its Super configuration."""


def put_files(root: Path, files: dict[str, str], **changed: str | None) -> Path:
    """Write the files; ``changed`` names them by their last two parts with ``_`` between, None leaves one out."""
    for name, text in files.items():
        key = "_".join(name.replace(".", "_").split("/")[-2:])
        content = changed.get(key, text)
        if content is not None:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    return root


NANO = JetsonState(
    model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    part="p3767-0005",
    memory_gb=7.8,
    l4t="36.4.3",
    jetpack="6.2",
    mode=PowerMode("MAXN_SUPER", 8, 1020.0, 3199.0),
    gpu_mhz=306.0,
    gpu_min_mhz=306.0,
    memory_mhz=3199.0,
)
"""What ``ORIN_NANO_SUPER`` tells."""
