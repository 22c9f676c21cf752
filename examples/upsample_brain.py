"""Upsample a real brain volume 2x, by trilinear interpolation and by a fitted pair of layers, and check the result.

The input is the MNI152 T1 template that ships inside the nilearn package, averaged over 2x2x2 voxels to 2 mm. It is
brought back to 1 mm by transposed convolutions in two ways:

- one channel to one, with the kernel that makes a stride-2 transposed convolution a trilinear interpolation;
- one channel to several (8 unless told) and back to one, as a network's decoder does it. The first layer's kernels are
  fixed; the second layer's are fitted to the 1 mm original by least squares on the back half of the brain.

Every step is compared with independent methods, and the exit status is 1 if an error exceeds its bound.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import numpy as np

import cuconvt

try:
    import matplotlib
    from nilearn.datasets import load_mni152_template
    from scipy import ndimage
except ImportError as error:
    sys.exit(f"{error}; this example needs, in the repository's root: pip install -e '.[examples]'")

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

STEPS = ("load", "trilinear", "expand", "fit", "mix", "check", "draw")
UPSAMPLE = {"stride": 2, "padding": 1}  # kernel 4: the output has twice the extent
MIX = {"stride": 1, "padding": 1}  # kernel 3: the output has the same extent
SAMPLES = 300
FIT_VOXELS = 40_000


def main() -> int:
    arguments = parse_arguments()
    device = Device(arguments.device)
    report = Report()
    rng = np.random.default_rng(0)

    report.step("load")
    original = load_volume()
    volume = halve(original).astype(arguments.dtype)[None]
    report.line(f"volume     MNI152 T1 at 2 mm, {volume.shape}, {volume.dtype}, largest value {volume.max():.3f}")
    report.line(f"device     {device.name}")
    report.line(f"backend    {device.backend}")

    report.step("trilinear")
    trilinear_kernel = kernel_bank(1).astype(arguments.dtype)
    x = device.put(volume)
    trilinear = device.timed(report, "trilinear", cuconvt.conv_transpose3d, x, device.put(trilinear_kernel), UPSAMPLE)

    report.step("expand")
    bank = kernel_bank(arguments.channels).astype(arguments.dtype)
    features = device.timed(report, "expand", cuconvt.conv_transpose3d, x, device.put(bank), UPSAMPLE)

    report.step("fit")
    mixing = fit_mixing(features, original, device, rng).astype(arguments.dtype)
    report.line(f"fit        {mixing.size} weights of shape {mixing.shape}, least squares over {FIT_VOXELS} voxels")

    report.step("mix")
    fitted = device.timed(report, "mix", cuconvt.conv_transpose3d, features, device.put(mixing), MIX)

    report.step("check")
    trilinear, features, fitted = (device.get(a) for a in (trilinear, features, fitted))
    zoomed = ndimage.zoom(volume[0].astype(np.float64), 2, order=1, mode="grid-constant", grid_mode=True)
    report.check("trilinear, every voxel, scipy.ndimage.zoom", trilinear[0], zoomed, 1.0)
    points = sample_voxels(original.shape, rng)
    for name, y, layer_input, weight, parameters in (
        ("trilinear", trilinear, volume, trilinear_kernel, UPSAMPLE),
        ("expand", features, volume, bank, UPSAMPLE),
        ("mix", fitted, features, mixing, MIX),
    ):
        expected, magnitude = evaluate_definition(layer_input, weight, points, **parameters)
        what = f"{name}, {len(points)} voxels, definition in float64"
        report.check(what, y[(slice(None), *points.T)], expected, magnitude)

    scores = {name: held_out_psnr(y[0], original) for name, y in (("trilinear", trilinear), ("fitted pair", fitted))}
    spelled = ", ".join(f"{name} {score:.2f} dB" for name, score in scores.items())
    report.line(f"accuracy   PSNR against the 1 mm original, front half of the brain: {spelled}")

    report.step("draw")
    draw(arguments.output, volume[0], trilinear[0], fitted[0], original, scores)
    report.line(f"picture    {arguments.output}")
    return report.finish()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("upsample_brain.png"), help="the PNG to write")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of all arrays")
    parser.add_argument("--channels", type=int, default=8, help="between the two layers of the pair, 1 to 64")
    arguments = parser.parse_args()
    if not 1 <= arguments.channels <= 64:
        parser.error(f"argument --channels: must be 1 to 64, got {arguments.channels}")
    if not arguments.output.parent.is_dir():
        parser.error(f"argument --output: no such folder: {arguments.output.parent}")
    return arguments


def load_volume() -> np.ndarray:
    """Return the packaged 1 mm template, values 0 to 1, cropped to even extents."""
    volume = load_mni152_template(resolution=1).get_fdata(dtype=np.float32)
    return volume[tuple(slice(extent // 2 * 2) for extent in volume.shape)]


def halve(volume: np.ndarray) -> np.ndarray:
    """Average over 2x2x2 voxels; voxel i of the result lies between 2i and 2i + 1, as in the upsampling."""
    d, h, w = volume.shape
    return volume.reshape(d // 2, 2, h // 2, 2, w // 2, 2).mean((1, 3, 5))


def kernel_bank(channels: int) -> np.ndarray:
    """Return a weight of shape (1, channels, 4, 4, 4) whose first channel interpolates linearly along each axis.

    With stride 2 and padding 1, tap k of input i lands on output o = 2i + k - 1. Output 2m lies at m - 1/4 between the
    inputs: 3/4 of input m (tap 1) and 1/4 of input m - 1 (tap 3). Output 2m + 1 lies at m + 1/4: 3/4 of input m (tap 2)
    and 1/4 of input m + 1 (tap 0). So the taps are [1, 3, 3, 1] / 4, and the 3-D kernel is their outer product.

    The other channels take a difference of neighbours instead of that mean, on one axis or more. Eight channels pair
    the mean with the curvature on all axes, which is what sharpening needs.
    """
    mean, curvature, slope, third = np.array([[1, 3, 3, 1], [1, -1, -1, 1], [1, 1, -1, -1], [1, -3, 3, -1]]) / 4
    filters = (mean, curvature, slope, third)
    chosen = sorted(itertools.product(range(4), repeat=3), key=lambda axes: (max(axes), sum(axes), axes))[:channels]
    kernels = [np.einsum("i,j,k->ijk", *(filters[n] for n in axes)) for axes in chosen]
    return np.stack(kernels)[None]


def fit_mixing(features, original: np.ndarray, device: Device, rng: np.random.Generator) -> np.ndarray:
    """Return the weight (C, 1, 3, 3, 3) that brings the features closest to the back half of the original."""
    inside = np.argwhere(back_half(original)[1:-1, 1:-1, 1:-1] > 0) + 1  # where all 27 taps read within the volume
    points = rng.choice(inside, FIT_VOXELS, replace=False)
    # Tap k of a layer with stride 1 and padding 1 reads its input at o + 1 - k.
    reads = [device.put((points + 1 - np.array(k)).T) for k in itertools.product(range(3), repeat=3)]
    columns = [features[:, d, h, w] for d, h, w in reads]
    design = np.stack([device.get(c).astype(np.float64) for c in columns], axis=1).reshape(-1, len(points))
    # The normal equations; rcond leaves out the combinations of weights that make no difference.
    solution, *_ = np.linalg.lstsq(design @ design.T, design @ original[tuple(points.T)], rcond=1e-10)
    return solution.reshape(-1, 1, 3, 3, 3)


def back_half(volume: np.ndarray) -> np.ndarray:
    return volume[:, : volume.shape[1] // 2]


def front_half(volume: np.ndarray) -> np.ndarray:
    return volume[:, volume.shape[1] // 2 :]


def held_out_psnr(y: np.ndarray, original: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio in decibels in the front half of the brain, where nothing was fitted."""
    y, original = front_half(y), front_half(original)
    error = (y - original)[original > 0].astype(np.float64)
    return float(-10 * np.log10(np.mean(error**2)))


def sample_voxels(extents: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return random output positions and the eight corners, one a row."""
    corners = list(itertools.product(*((0, extent - 1) for extent in extents)))
    return np.concatenate([rng.integers(0, extents, (SAMPLES, 3)), corners])


def evaluate_definition(
    x: np.ndarray, weight: np.ndarray, points: np.ndarray, stride: int, padding: int
) -> tuple[np.ndarray, float]:
    """Evaluate y[co, o] = sum of x[ci, i] * w[ci, co, k] over i * stride + k = o + padding, in float64.

    Returns
    -------
    y : numpy.ndarray
        Shape (C_out, points).
    magnitude : float
        The largest sum of |x * w|: rounding errors are in proportion to it.
    """
    y = np.zeros((weight.shape[1], len(points)))
    magnitudes = np.zeros_like(y)
    for k in itertools.product(*map(range, weight.shape[2:])):
        numerator = points + padding - np.array(k)
        i = numerator // stride
        reached = np.all((numerator % stride == 0) & (i >= 0) & (i < x.shape[1:]), axis=1)
        values = x[(slice(None), *i[reached].T)].astype(np.float64)
        taps = weight[(slice(None), slice(None), *k)].astype(np.float64)
        y[:, reached] += taps.T @ values
        magnitudes[:, reached] += abs(taps).T @ abs(values)
    return y, float(magnitudes.max())


def draw(
    path: Path,
    volume: np.ndarray,
    trilinear: np.ndarray,
    fitted: np.ndarray,
    original: np.ndarray,
    scores: dict[str, float],
) -> None:
    """Write an axial and a coronal slice and a detail of the front half: before, after, and as it should be."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = (
        "input, 2 mm",
        f"trilinear 2x\n{scores['trilinear']:.1f} dB",
        f"fitted pair 2x\n{scores['fitted pair']:.1f} dB",
        "original, 1 mm",
    )
    volumes = (volume, trilinear, fitted, original)
    # The views in millimetres of the 1 mm volume: a slice of axis `axis` at `position`, cut to `box`.
    views = (
        ("axial", 2, 82, (20, 176, 22, 212)),
        ("detail", 2, 82, (110, 170, 120, 180)),
        ("coronal", 1, 112, (20, 176, 18, 160)),
    )
    heights = [(box[3] - box[2]) / (box[1] - box[0]) for *_, box in views]
    figure, axes = plt.subplots(
        len(views), 4, figsize=(10, 2.42 * sum(heights) + 0.7), height_ratios=heights, layout="constrained"
    )
    for panel, title in zip(axes[0], titles, strict=True):
        panel.set_title(title, fontsize=11)
    for row, (name, axis, position, box) in zip(axes, views, strict=True):
        for panel, v in zip(row, volumes, strict=True):
            voxel = original.shape[0] // v.shape[0]
            image = v.take(position // voxel, axis=axis).T
            panel.imshow(
                image,
                origin="lower",
                cmap="gray",
                vmin=0.2,
                vmax=0.95,
                interpolation="nearest",
                extent=(0, image.shape[1] * voxel, 0, image.shape[0] * voxel),
            )
            panel.set(xlim=box[:2], ylim=box[2:], xticks=[], yticks=[])
        row[0].set_ylabel(name, fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)


class Device:
    """NumPy, or CuPy on the current GPU."""

    def __init__(self, choice: str):
        self.cupy = None if choice == "cpu" else find_gpu()
        if choice == "gpu" and self.cupy is None:
            sys.exit("--device gpu needs CuPy and a CUDA GPU; `python -m cuconvt info` names what is missing")
        if self.cupy is None:
            self.name = f"cpu (NumPy {np.__version__})"
            self.backend = "NumPy, matrix products by phases"
        else:
            index = self.cupy.cuda.Device().id
            properties = self.cupy.cuda.runtime.getDeviceProperties(index)
            self.name = f"cuda:{index}, {properties['name'].decode()} (CuPy {self.cupy.__version__})"
            self.backend = "CUDA kernels by phases (CUCONVT_DEBUG=plan shows which)"

    def put(self, array: np.ndarray):
        return array if self.cupy is None else self.cupy.asarray(array)

    def get(self, array) -> np.ndarray:
        return array if self.cupy is None else self.cupy.asnumpy(array)

    def timed(self, report: Report, name: str, function, x, weight, parameters: dict[str, int]):
        """Call the function and report shapes and time; on a GPU twice, since the first call compiles the kernel."""
        times = []
        for _ in range(1 if self.cupy is None else 2):
            start = time.perf_counter()
            y = function(x, weight, **parameters)
            if self.cupy is not None:
                self.cupy.cuda.get_current_stream().synchronize()
            times.append(time.perf_counter() - start)
        first = "" if len(times) == 1 else f" (first call {spell_time(times[0])})"
        kernel = "x".join(map(str, weight.shape[2:]))
        report.line(
            f"{name:<10} {x.shape} -> {y.shape}, kernel {kernel}, stride {parameters['stride']}: "
            f"{spell_time(times[-1])}{first}"
        )
        return y


def find_gpu():
    """Return the cupy module if it is installed and sees a GPU, else None."""
    try:
        import cupy
    except ImportError:
        return None
    return cupy if cupy.is_available() else None


def spell_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


class Report:
    """The lines on standard output, a progress bar on standard error if that is a terminal, and the verdict."""

    def __init__(self):
        self.bar = None if tqdm is None else tqdm(total=len(STEPS), leave=False, disable=None)
        self.failures = 0

    def step(self, name: str) -> None:
        if self.bar is not None:
            self.bar.set_description(name)
            self.bar.update(STEPS.index(name) - self.bar.n)

    def line(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        print(text, flush=True)
        if self.bar is not None:
            self.bar.refresh()

    def check(self, what: str, y: np.ndarray, expected: np.ndarray, magnitude: float) -> None:
        """Compare elementwise; the bound is 16 units of rounding of the largest sum of |products|."""
        error = float(np.max(abs(y - expected)))
        bound = 16 * float(np.finfo(y.dtype).eps) * magnitude
        passed = error <= bound  # False for NaN
        self.failures += not passed
        self.line(f"check      {what}: largest error {error:.1e}, bound {bound:.1e}, {'ok' if passed else 'TOO LARGE'}")

    def finish(self) -> int:
        if self.bar is not None:
            self.bar.close()
        return 1 if self.failures else 0


if __name__ == "__main__":
    sys.exit(main())
