"""The line people read."""

from __future__ import annotations


def log_line(
    *,
    step: int,
    num_steps: int,
    tokens: int,
    loss: float,
    lr: float,
    grad_norm: float,
    step_time_s: float,
    tokens_per_second: float,
    mfu: float | None,
    memory_bytes: int,
    time_left_s: float,
    waited: float | None = None,
) -> str:
    """One step in one readable line of aligned columns; `tokens` over all stages, `mfu` 0 to 1 or None, `waited` the
    share of the step in which pipeline ranks waited for one another."""
    width = len(str(num_steps))
    utilisation = "n/a" if mfu is None else f"{100 * mfu:.1f}%"
    return " | ".join(
        [
            f"step {step:>{width}}/{num_steps}",
            f"tokens {short(tokens):>6}",
            f"loss {loss:.4f}",
            f"lr {lr:.2e}",
            f"grad norm {grad_norm:.3f}",
            f"{1000 * step_time_s:.0f} ms",
            f"{short(tokens_per_second):>6} tokens/s",
            f"MFU {utilisation}",
            f"{memory_bytes / 2**30:.2f} GiB",
            *([] if waited is None else [f"waited {waited:.1%}"]),
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
