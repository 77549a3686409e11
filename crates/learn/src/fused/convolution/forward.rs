//! The forward pass: convolution, activation and pooling of a few output channels at a time.

use pulp::{Simd, WithSimd};

use super::{CUT, PAIR, Sizes, load, store};

/// A forward pass.
pub(crate) struct Forward<'a> {
    pub(crate) sizes: Sizes,
    /// `[in, height, width, lanes]`, padded.
    pub(crate) input: &'a [f32],
    /// `[out, in, kernel height, kernel width]`.
    pub(crate) weight: &'a [f32],
    pub(crate) bias: &'a [f32],
    /// `[out, pooled height, pooled width, lanes]`.
    pub(crate) output: &'a mut [f32],
    /// Which position of its window each output came from.
    pub(crate) source: &'a mut [u32],
}

/// Output channels whose sums are in registers together.
const TILE: usize = 6;

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let sizes = self.sizes;
        let Some([height, width]) = sizes.output() else { return };
        let (taps, outputs) = (sizes.taps(), sizes.channels[1]);
        // Every access below stays within these bounds.
        assert!(sizes.lanes.is_multiple_of(S::F32_LANES));
        assert!(self.input.len() >= sizes.input_floats());
        assert!(self.weight.len() == outputs * taps && self.bias.len() == outputs);
        assert!(self.output.len() == outputs * height * width * sizes.lanes);
        assert!(self.source.len() == self.output.len());
        let offsets = sizes.offsets();
        let mut packed = vec![0.0f32; taps * TILE];
        let mut first = 0;
        while first < outputs {
            let tile = TILE.min(outputs - first);
            for tap in 0..taps {
                for channel in 0..tile {
                    packed[tap * tile + channel] = self.weight[(first + channel) * taps + tap];
                }
            }
            let bias = &self.bias[first..first + tile];
            let plane = height * width * sizes.lanes;
            let output = &mut self.output[first * plane..(first + tile) * plane];
            let source = &mut self.source[first * plane..(first + tile) * plane];
            let part = Part { sizes, offsets: &offsets, input: self.input, weight: &packed, bias };
            // SAFETY: the bounds were checked above, and `part` covers channels of this tile only.
            unsafe {
                match tile {
                    6 => part.forward::<S, 6>(simd, output, source),
                    5 => part.forward::<S, 5>(simd, output, source),
                    4 => part.forward::<S, 4>(simd, output, source),
                    3 => part.forward::<S, 3>(simd, output, source),
                    2 => part.forward::<S, 2>(simd, output, source),
                    _ => part.forward::<S, 1>(simd, output, source),
                }
            }
            first += tile;
        }
    }
}

/// A few output channels of a forward pass.
struct Part<'a> {
    sizes: Sizes,
    offsets: &'a [usize],
    input: &'a [f32],
    /// `[tap, channel of the tile]`.
    weight: &'a [f32],
    bias: &'a [f32],
}

impl Part<'_> {
    /// # Safety
    /// `output` and `source` hold T channels, and the other slices fit the sizes.
    #[inline(always)]
    unsafe fn forward<S: Simd, const T: usize>(
        &self,
        simd: S,
        output: &mut [f32],
        source: &mut [u32],
    ) {
        let sizes = &self.sizes;
        let Some([height, width]) = sizes.output() else { return };
        for row in 0..height {
            for column in 0..width {
                let at = (row * width + column) * sizes.lanes;
                let mut lane = 0;
                while lane + PAIR * S::F32_LANES <= sizes.lanes {
                    // SAFETY: the caller's bounds.
                    unsafe {
                        self.window::<S, T, PAIR>(
                            simd,
                            [row, column],
                            lane,
                            output.as_mut_ptr().add(at + lane),
                            source.as_mut_ptr().add(at + lane),
                        );
                    }
                    lane += PAIR * S::F32_LANES;
                }
                while lane < sizes.lanes {
                    // SAFETY: the caller's bounds.
                    unsafe {
                        self.window::<S, T, 1>(
                            simd,
                            [row, column],
                            lane,
                            output.as_mut_ptr().add(at + lane),
                            source.as_mut_ptr().add(at + lane),
                        );
                    }
                    lane += S::F32_LANES;
                }
            }
        }
    }

    /// One pooling window: the convolution at each of its positions, the largest kept.
    #[inline(always)]
    unsafe fn window<S: Simd, const T: usize, const V: usize>(
        &self,
        simd: S,
        [row, column]: [usize; 2],
        lane: usize,
        output: *mut f32,
        source: *mut u32,
    ) {
        let sizes = &self.sizes;
        let pool = sizes.pool;
        let zero = simd.splat_f32s(0.0);
        let mut best = [[zero; V]; T];
        let mut from = [[simd.splat_u32s(0); V]; T];
        for position in 0..pool * pool {
            let y = (row * pool + position / pool) * sizes.stride[0];
            let x = (column * pool + position % pool) * sizes.stride[1];
            let mut sums = [[zero; V]; T];
            for (channel, sum) in sums.iter_mut().enumerate() {
                // SAFETY: T biases.
                *sum = [simd.splat_f32s(unsafe { *self.bias.get_unchecked(channel) }); V];
            }
            // SAFETY: every tap of every position of every window lies within the padded input.
            unsafe {
                let base = self.input.as_ptr().add((y * sizes.padded[1] + x) * sizes.lanes + lane);
                let mut weight = self.weight.as_ptr();
                for &offset in self.offsets {
                    let pixel = base.add(offset);
                    let mut values = [zero; V];
                    for (v, value) in values.iter_mut().enumerate() {
                        *value = load(simd, pixel.add(v * S::F32_LANES));
                    }
                    for (channel, sum) in sums.iter_mut().enumerate() {
                        let factor = simd.splat_f32s(*weight.add(channel));
                        for v in 0..V {
                            sum[v] = simd.mul_add_e_f32s(factor, values[v], sum[v]);
                        }
                    }
                    weight = weight.add(T);
                }
            }
            if position == 0 {
                best = sums;
            } else {
                let here = simd.splat_u32s(position as u32);
                for channel in 0..T {
                    for v in 0..V {
                        let larger = simd.less_than_f32s(best[channel][v], sums[channel][v]);
                        best[channel][v] =
                            simd.select_f32s(larger, sums[channel][v], best[channel][v]);
                        from[channel][v] = simd.select_u32s(larger, here, from[channel][v]);
                    }
                }
            }
        }
        let plane = match sizes.output() {
            Some([height, width]) => height * width * sizes.lanes,
            None => 0,
        };
        let cut = simd.splat_u32s(CUT);
        for channel in 0..T {
            for v in 0..V {
                let (mut value, mut origin) = (best[channel][v], from[channel][v]);
                if sizes.relu {
                    let off = simd.less_than_or_equal_f32s(value, zero);
                    value = simd.select_f32s(off, zero, value);
                    origin = simd.select_u32s(off, cut, origin);
                }
                // SAFETY: T planes behind the pointers.
                unsafe {
                    store(output.add(channel * plane + v * S::F32_LANES), value);
                    source
                        .add(channel * plane + v * S::F32_LANES)
                        .cast::<S::u32s>()
                        .write_unaligned(origin);
                }
            }
        }
    }
}
