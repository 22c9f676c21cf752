"""Named problems that once broke a kernel or that a benchmark is built on, at extents that run in milliseconds."""

from __future__ import annotations

from strategies import LAST, case

FIXED = {
    # KernelBench level 1, problems 58, 61, 70, 72, 73 and 77, as published but for smaller extents.
    "kb58": case((1, 32, 3, 4, 6), 16, (3, 5, 7)),
    "kb61": case((1, 48, 4, 5, 6), 48, 3),
    "kb70": case((1, 48, 5, 6, 7), 24, 3),
    "kb72": case((2, 32, 3, 4, 6), 32, (3, 5, 7), stride=2, padding=(1, 2, 3), output_padding=1, groups=4),
    "kb73": case((2, 32, 4, 5, 9), 32, 3, stride=2, padding=1, groups=4),
    "kb77": case((1, 32, 4, 5, 6), 64, 3, stride=2, padding=1, dilation=2),
    # Layers of networks in use.
    "unet_k2s2": case((2, 32, 4, 4, 5), 16, 2, stride=2, has_bias=True),
    "unet_k3s2": case((1, 32, 5, 4, 5), 16, 3, stride=2, padding=1, output_padding=1, has_bias=True),
    "gan_3d": case((1, 64, 3, 3, 3), 32, 4, stride=2, padding=1),
    "depthwise": case((2, 24, 5, 6, 7), 24, 4, stride=2, padding=1, groups=24, has_bias=True),
    "depthwise_multiplier": case((2, 6, 5, 6, 7), 18, 3, stride=(1, 2, 3), groups=6),
    "gan_2d": case((2, 64, 5, 6), 32, 4, stride=2, padding=1),
    "vocoder_1d": case((2, 48, 19), 24, 16, stride=8, padding=4, has_bias=True),
    "one_channel_volume": case((1, 1, 9, 10, 11), 1, 4, stride=2, padding=1),
    "colours": case((2, 64, 5, 12), 3, 4, stride=2, padding=1, has_bias=True),
    "mask": case((1, 17, 4, 5, 7), 1, 3, padding=1),
    # One property each.
    "dead_phases": case((2, 5, 4, 5, 6), 7, 3, stride=2, dilation=2, has_bias=True),
    "dead_phases_gcd_2_of_4": case((1, 3, 5, 4), 4, 3, stride=4, dilation=2, output_padding=3, has_bias=True),
    "dead_phases_unpadded_corner": case((1, 3, 5, 4), 4, 2, stride=2, dilation=4, padding=((1, 0), (0, 3))),
    "negative_numerators": case((1, 3, 2, 3, 2), 4, (7, 6, 5), stride=(3, 4, 2), dilation=(4, 3, 3)),
    "kernel_larger_than_input": case((2, 3, 2, 1, 3), 4, 7, stride=2, padding=2),
    "padding_eats_whole_taps": case((1, 4, 4, 5, 6), 3, 3, padding=2, has_bias=True),
    "padding_eats_whole_inputs": case((1, 4, 6, 7), 3, 3, stride=2, padding=((5, 4), (6, 3)), has_bias=True),
    "padding_on_one_side": case((1, 4, 6, 7), 3, 4, stride=2, padding=((0, 3), (2, 0))),
    "one_output": case((1, 4, 3, 3), 3, 3, padding=((2, 2), (0, 4))),
    "output_padding_past_every_tap": case((1, 4, 6, 7), 3, 1, stride=4, output_padding=3, has_bias=True),
    "stride_larger_than_kernel": case((2, 4, 5, 6, 3), 3, (1, 2, 1), stride=(3, 4, 2), has_bias=True),
    "unbatched": case((6, 4, 5, 6), 4, 3, stride=2, padding=1, groups=2, rank=3, has_bias=True),
    "unbatched_1d": case((6, 9), 4, 3, stride=3, rank=1),
    "extent_one": case((1, 1, 1, 1, 1), 1, 1),
    "dilation_alone": case((2, 3, 9), 4, 5, dilation=4, padding=3),
    "groups_of_unequal_width": case((1, 6, 7, 8), 15, (3, 2), stride=(2, 1), groups=3),
    "odd_channels": case((1, 17, 5, 6), 33, 3, stride=2),
}

# Where an infinity that a kernel multiplies by an inserted zero, or reads past a border, would show.
SPECIAL = {
    name: FIXED[name] for name in ("kb72", "kb73", "dead_phases", "depthwise", "padding_eats_whole_taps", "unbatched")
}

# Channels-last, with positions or groups that start at multiples of so many bytes in 16 bits, of twice as many in
# float32: of x, and of the result.
RAGGED = {
    "by_eight": (case((2, 20, 5, 9, 17), 12, 3, 2, 1, has_bias=True, **LAST), (8, 8)),
    "groups_by_eight": (case((2, 24, 5, 9, 17), 40, 3, 2, 1, 1, groups=2, has_bias=True, **LAST), (8, 8)),
    "by_four": (case((3, 10, 9, 37), 18, (3, 4), 2, 1, **LAST), (4, 4)),
    "by_two": (case((3, 21, 101), 13, 4, 2, 1, has_bias=True, **LAST), (2, 2)),
    "without_a_stride": (case((2, 36, 13, 17), 22, 3, padding=1, **LAST), (8, 4)),
    "one_of_both": (case((2, 32, 5, 9, 17), 28, (2, 3, 3), (1, 2, 2), **LAST), (16, 8)),
}

# From many channels to few: rows that are whole fours or not, several boxes along each axis, weights that stay or pass.
FEW_RESULTS = {
    "colours": case((3, 64, 37, 52), 3, 4, 2, padding=1, has_bias=True),
    "colours_last": case((3, 64, 37, 51), 3, 4, 2, padding=1, has_bias=True, **LAST),
    "to_last": case((2, 40, 33, 27), 4, 3, 2, padding=1, output_padding=1, out_layout="channels_last"),
    "mask": case((2, 96, 50, 41), 1, 5, padding=2),
    "volume": case((2, 32, 9, 21, 36), 2, 3, 2, padding=1, output_padding=1, has_bias=True),
    "volume_last": case((2, 36, 9, 21, 19), 1, 4, 2, padding=1, **LAST),
    "many_taps": case((1, 20, 9, 19, 22), 1, 5, padding=2, has_bias=True),
    "row": case((4, 64, 515), 1, 16, 8, padding=4, has_bias=True),
    "row_last": case((5, 48, 300), 3, 7, 3, padding=2, **LAST),
    "many_channels": case((2, 600, 19, 36), 4, 7, 2, padding=2),
    "dilated": case((2, 24, 17, 33), 2, (3, 4), 2, dilation=(5, 3), output_padding=(4, 2), has_bias=True),
    "grouped": case((2, 96, 21, 24), 6, 3, 2, padding=1, groups=3),
    "disjoint": case((2, 50, 9, 13, 21), 3, 2, 2),
    "bias_alone": case((2, 16, 9, 13), 2, (1, 2), 4, output_padding=3, has_bias=True),
    "padding_cuts": case((2, 24, 60, 71), 1, 3, padding=((20, 30), (40, 9)), has_bias=True),
    "gaps": case((2, 24, 9, 21, 36), 2, 3, padding=1, x_layout="cropped", out_layout="misaligned"),
    "strided": case((2, 24, 21, 36), 2, 3, 2, padding=1, x_layout="strided", out_layout="strided"),
    "broadcast": case((2, 24, 21, 36), 2, 3, 2, padding=1, x_layout="broadcast"),
}
