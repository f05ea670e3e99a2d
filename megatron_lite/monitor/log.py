"""The line people read."""

from __future__ import annotations

from typing import Any


def log_line(entry: dict[str, Any], num_steps: int, time_left_s: float, memory_bytes: int) -> str:
    """One step in one readable line, from its entry in metrics.jsonl; tokens are those of all stages."""
    width = len(str(num_steps))
    utilisation = "n/a" if entry["mfu"] is None else f"{100 * entry['mfu']:.1f}%"
    return " | ".join(
        [
            f"step {entry['step']:>{width}}/{num_steps}",
            f"tokens {short(entry['total_tokens']):>5}",
            f"loss {entry['loss']:.4f}",
            f"lr {entry['lr']:.2e}",
            f"grad norm {entry['grad_norm']:.3f}",
            f"{1000 * entry['step_time_s']:.0f} ms",
            f"{short(entry['tokens_per_second']):>5} tokens/s",
            f"MFU {utilisation}",
            f"{memory_bytes / 2**30:.2f} GiB",
            f"{duration(time_left_s)} left",
        ]
    )


def short(number: float) -> str:
    """A count with three digits and a decimal suffix: 950, 12.3k, 4.19M, 4.00T."""
    for suffix in ("", "k", "M", "B"):
        if abs(number) < 999.5:
            digits = 0 if not suffix else 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
            return f"{number:.{digits}f}{suffix}"
        number /= 1000
    return f"{number:.2f}T"


def duration(seconds: float) -> str:
    """A time in its two largest units: 42s, 3m05s, 2h07m, 29d04h."""
    total = max(round(seconds), 0)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{total % 60:02d}s" if minutes else f"{total}s"
