//! Convolution, bias, ReLU and max pooling in one pass, and its backward pass, on plain slices.
//!
//! **The layout is the trick.** The batch is the innermost dimension (`[channel, row, column,
//! sample]`), so one vector instruction works on the same pixel of eight samples. Any kernel size,
//! stride, dilation or padding is then a list of offsets, no matrix of patches is ever written, and
//! activation and pooling are comparisons between whole registers. Only the pooled values and where
//! each came from leave the registers.
//!
//! Each kernel keeps a tile of sums in registers and runs over the rest; the tiles are sized for
//! sixteen vector registers. Instructions are chosen at run time by `pulp`. The order of all sums
//! is fixed by the shapes, so the same batch gives the same bits.

use pulp::{Simd, WithSimd};

mod backward;
mod forward;

pub(crate) use backward::Backward;
pub(crate) use forward::Forward;

/// Vectors of samples that are worked on together.
const PAIR: usize = 2;

/// Where the gradient of a pooled value goes if the activation cut it off.
const CUT: u32 = u32::MAX;

/// The sizes of one convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Samples, rounded up so that vectors come out even; the rest are zeros.
    pub(crate) lanes: usize,
    /// Input and output channels.
    pub(crate) channels: [usize; 2],
    /// Height and width of the input with its padding.
    pub(crate) padded: [usize; 2],
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) dilation: [usize; 2],
    /// Side and stride of the pooling window; 1 for none.
    pub(crate) pool: usize,
    /// Whether negative results are cut off.
    pub(crate) relu: bool,
}

impl Sizes {
    /// Height and width behind the pooling; `None` if nothing is left.
    pub(crate) fn output(&self) -> Option<[usize; 2]> {
        let side = |at: usize| {
            let reach = self.dilation[at] * (self.kernel[at].checked_sub(1)?) + 1;
            let positions = self.padded[at].checked_sub(reach)? / self.stride[at] + 1;
            Some(positions / self.pool).filter(|&pooled| pooled > 0)
        };
        Some([side(0)?, side(1)?])
    }

    fn taps(&self) -> usize {
        self.channels[0] * self.kernel[0] * self.kernel[1]
    }

    /// Floats between an output position's first input and the input under each tap.
    fn offsets(&self) -> Vec<usize> {
        let mut offsets = Vec::with_capacity(self.taps());
        for channel in 0..self.channels[0] {
            for row in 0..self.kernel[0] {
                for column in 0..self.kernel[1] {
                    let row = channel * self.padded[0] + row * self.dilation[0];
                    let pixel = row * self.padded[1] + column * self.dilation[1];
                    offsets.push(pixel * self.lanes);
                }
            }
        }
        offsets
    }

    pub(crate) fn input_floats(&self) -> usize {
        self.channels[0] * self.padded[0] * self.padded[1] * self.lanes
    }
}

/// Runs `work` with the vectors that this machine has.
pub(crate) fn run(work: impl WithSimd<Output = ()>) {
    // AVX2 and FMA are asked for by name: `pulp::Arch` knows them only behind a cargo feature.
    #[cfg(target_arch = "x86_64")]
    match pulp::x86::V3::try_new() {
        Some(simd) => Simd::vectorize(simd, work),
        None => Simd::vectorize(pulp::Scalar, work),
    }
    #[cfg(not(target_arch = "x86_64"))]
    pulp::Arch::new().dispatch(work);
}

/// # Safety
/// A whole vector lies behind the pointer.
#[inline(always)]
unsafe fn load<S: Simd>(_simd: S, from: *const f32) -> S::f32s {
    // SAFETY: the caller's.
    unsafe { from.cast::<S::f32s>().read_unaligned() }
}

/// # Safety
/// A whole vector lies behind the pointer.
#[inline(always)]
unsafe fn store<V>(into: *mut f32, value: V) {
    // SAFETY: the caller's.
    unsafe { into.cast::<V>().write_unaligned(value) }
}
