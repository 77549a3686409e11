//! The backward pass, one row of pooling windows at a time: the gradient of the whole convolution
//! never exists at once.

use pulp::{Simd, WithSimd};

use super::{PAIR, Sizes, load, store};

/// A backward pass.
pub(crate) struct Backward<'a> {
    pub(crate) sizes: Sizes,
    /// As in the forward pass.
    pub(crate) input: &'a [f32],
    /// As in the forward pass.
    pub(crate) weight: &'a [f32],
    /// As the forward pass left it.
    pub(crate) source: &'a [u32],
    /// The gradient of the output. Lanes beyond the batch are zeros.
    pub(crate) gradient: &'a [f32],
    /// Written, where wanted: the gradient of the padded input.
    pub(crate) input_gradient: Option<&'a mut [f32]>,
    /// Written.
    pub(crate) weight_gradient: &'a mut [f32],
    /// Written.
    pub(crate) bias_gradient: &'a mut [f32],
}

/// Taps whose input gradients are in registers together.
const TILE: usize = 6;

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let sizes = self.sizes;
        let Some([height, width]) = sizes.output() else { return };
        let (taps, outputs, pool) = (sizes.taps(), sizes.channels[1], sizes.pool);
        // Every access below stays within these bounds.
        assert!(sizes.lanes.is_multiple_of(S::F32_LANES));
        assert!(self.input.len() >= sizes.input_floats());
        assert!(self.weight.len() == outputs * taps);
        assert!(self.weight_gradient.len() == outputs * taps);
        assert!(self.bias_gradient.len() == outputs);
        assert!(self.gradient.len() == outputs * height * width * sizes.lanes);
        assert!(self.source.len() == self.gradient.len());
        let offsets = sizes.offsets();
        let mut rows = Rows {
            sizes,
            offsets: &offsets,
            // One row of windows, as the convolution saw it.
            dense: vec![0.0; outputs * pool * width * pool * sizes.lanes],
            weight_sums: vec![0.0; outputs * taps * S::F32_LANES],
            bias_sums: vec![0.0; outputs * S::F32_LANES],
            packed: Vec::new(),
        };
        if let Some(input_gradient) = self.input_gradient.as_deref_mut() {
            assert!(input_gradient.len() == sizes.input_floats());
            input_gradient.fill(0.0);
            rows.packed = scatter_order(self.weight, taps, outputs);
        }
        for row in 0..height {
            // SAFETY: the bounds were checked above.
            unsafe {
                rows.spread(simd, row, self.gradient, self.source);
                rows.weights(simd, row, self.input);
                if let Some(input_gradient) = self.input_gradient.as_deref_mut() {
                    rows.inputs(simd, row, input_gradient);
                }
            }
        }
        let sums = rows.weight_sums.chunks_exact(S::F32_LANES);
        for (into, sum) in self.weight_gradient.iter_mut().zip(sums) {
            // SAFETY: the chunk is a vector.
            *into = simd.reduce_sum_f32s(unsafe { load(simd, sum.as_ptr()) });
        }
        let sums = rows.bias_sums.chunks_exact(S::F32_LANES);
        for (into, sum) in self.bias_gradient.iter_mut().zip(sums) {
            // SAFETY: the chunk is a vector.
            *into = simd.reduce_sum_f32s(unsafe { load(simd, sum.as_ptr()) });
        }
    }
}

/// Weights in the order in which `Rows::inputs` reads them: per tile of taps, `[channel, tap]`.
fn scatter_order(weight: &[f32], taps: usize, outputs: usize) -> Vec<f32> {
    let mut packed = Vec::with_capacity(taps * outputs);
    let mut first = 0;
    while first < taps {
        let tile = TILE.min(taps - first);
        for channel in 0..outputs {
            packed.extend_from_slice(&weight[channel * taps + first..][..tile]);
        }
        first += tile;
    }
    packed
}

/// A backward pass, one row of pooling windows at a time.
struct Rows<'a> {
    sizes: Sizes,
    offsets: &'a [usize],
    /// `[out, row of the window, column, lanes]`: the gradient of the convolution.
    dense: Vec<f32>,
    /// `[out, tap, lanes of a vector]`.
    weight_sums: Vec<f32>,
    bias_sums: Vec<f32>,
    /// See `scatter_order`.
    packed: Vec<f32>,
}

impl Rows<'_> {
    /// Floats in a row of the convolution.
    #[inline(always)]
    fn line(&self) -> usize {
        let width = self.sizes.output().map_or(0, |[_, width]| width);
        width * self.sizes.pool * self.sizes.lanes
    }

    /// Hands the gradient of each window to the position that its value came from.
    #[inline(always)]
    unsafe fn spread<S: Simd>(&mut self, simd: S, row: usize, gradient: &[f32], source: &[u32]) {
        let Some([height, width]) = self.sizes.output() else { return };
        let (lanes, pool, line) = (self.sizes.lanes, self.sizes.pool, self.line());
        let zero = simd.splat_f32s(0.0);
        for channel in 0..self.sizes.channels[1] {
            let from = (channel * height + row) * width * lanes;
            let into = channel * pool * line;
            // SAFETY: the caller's bounds; the loops stay within a row.
            unsafe {
                let bias = self.bias_sums.as_mut_ptr().add(channel * S::F32_LANES);
                let mut sum = load(simd, bias);
                for column in 0..width {
                    let mut lane = 0;
                    while lane < lanes {
                        let at = from + column * lanes + lane;
                        let value = load(simd, gradient.as_ptr().add(at));
                        let origin = source.as_ptr().add(at).cast::<S::u32s>().read_unaligned();
                        for position in 0..pool * pool {
                            let here = simd.splat_u32s(position as u32);
                            let mine = simd.equal_u32s(origin, here);
                            let part = simd.select_f32s(mine, value, zero);
                            sum = simd.add_f32s(sum, part);
                            let (y, x) = (position / pool, position % pool);
                            let pixel = into + y * line + (column * pool + x) * lanes + lane;
                            store(self.dense.as_mut_ptr().add(pixel), part);
                        }
                        lane += S::F32_LANES;
                    }
                }
                store(bias, sum);
            }
        }
    }

    /// Adds the row's part to the gradient of the weights.
    #[inline(always)]
    unsafe fn weights<S: Simd>(&mut self, simd: S, row: usize, input: &[f32]) {
        let outputs = self.sizes.channels[1];
        // Twelve sums either way; the one that divides the channels wastes none.
        let wide = !outputs.is_multiple_of(4) && outputs.is_multiple_of(3);
        let mut channel = 0;
        while channel < outputs {
            let tile = if wide { 3 } else { 4.min(outputs - channel) };
            // SAFETY: the caller's bounds.
            unsafe {
                match tile {
                    4 => self.weights_of::<S, 4, 3>(simd, row, channel, input),
                    3 => self.weights_of::<S, 3, 4>(simd, row, channel, input),
                    2 => self.weights_of::<S, 2, 5>(simd, row, channel, input),
                    _ => self.weights_of::<S, 1, 8>(simd, row, channel, input),
                }
            }
            channel += tile;
        }
    }

    #[inline(always)]
    unsafe fn weights_of<S: Simd, const T: usize, const U: usize>(
        &mut self,
        simd: S,
        row: usize,
        channel: usize,
        input: &[f32],
    ) {
        let mut tap = 0;
        // SAFETY: the caller's bounds.
        unsafe {
            while tap + U <= self.offsets.len() {
                self.weights_at::<S, T, U>(simd, row, channel, tap, input);
                tap += U;
            }
            while tap < self.offsets.len() {
                self.weights_at::<S, T, 1>(simd, row, channel, tap, input);
                tap += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn weights_at<S: Simd, const T: usize, const U: usize>(
        &mut self,
        simd: S,
        row: usize,
        channel: usize,
        tap: usize,
        input: &[f32],
    ) {
        let sizes = self.sizes;
        let (pool, line, taps) = (sizes.pool, self.line(), self.offsets.len());
        let mut sums = [[simd.splat_f32s(0.0); U]; T];
        // Neighbours in the output are neighbours in the input unless the stride skips some.
        let (run, jump) = match sizes.stride[1] {
            1 => (line, 0),
            stride => (sizes.lanes, stride * sizes.lanes),
        };
        // SAFETY: the caller's bounds; a run never leaves its row.
        unsafe {
            for y in 0..pool {
                let top = (row * pool + y) * sizes.stride[0] * sizes.padded[1] * sizes.lanes;
                let mut base = input.as_ptr().add(top);
                let mut dense = self.dense.as_ptr().add((channel * pool + y) * line);
                let mut done = 0;
                while done < line {
                    let mut at = 0;
                    while at < run {
                        let mut pixels = [simd.splat_f32s(0.0); U];
                        for (u, pixel) in pixels.iter_mut().enumerate() {
                            *pixel =
                                load(simd, base.add(*self.offsets.get_unchecked(tap + u) + at));
                        }
                        for (t, sum) in sums.iter_mut().enumerate() {
                            let value = load(simd, dense.add(t * pool * line + at));
                            for u in 0..U {
                                sum[u] = simd.mul_add_e_f32s(value, pixels[u], sum[u]);
                            }
                        }
                        at += S::F32_LANES;
                    }
                    base = base.add(jump);
                    dense = dense.add(run);
                    done += run;
                }
            }
            for (t, sum) in sums.iter().enumerate() {
                for (u, &sum) in sum.iter().enumerate() {
                    let at = ((channel + t) * taps + tap + u) * S::F32_LANES;
                    let total = self.weight_sums.as_mut_ptr().add(at);
                    store(total, simd.add_f32s(load(simd, total), sum));
                }
            }
        }
    }

    /// Adds the row's part to the gradient of the input.
    #[inline(always)]
    unsafe fn inputs<S: Simd>(&self, simd: S, row: usize, input_gradient: &mut [f32]) {
        let taps = self.offsets.len();
        let whole = taps / TILE * TILE;
        // SAFETY: the caller's bounds.
        unsafe {
            let into = input_gradient.as_mut_ptr();
            for tap in (0..whole).step_by(TILE) {
                self.inputs_of::<S, TILE>(simd, row, tap, into);
            }
            match taps - whole {
                5 => self.inputs_of::<S, 5>(simd, row, whole, into),
                4 => self.inputs_of::<S, 4>(simd, row, whole, into),
                3 => self.inputs_of::<S, 3>(simd, row, whole, into),
                2 => self.inputs_of::<S, 2>(simd, row, whole, into),
                1 => self.inputs_of::<S, 1>(simd, row, whole, into),
                _ => {}
            }
        }
    }

    #[inline(always)]
    unsafe fn inputs_of<S: Simd, const U: usize>(
        &self,
        simd: S,
        row: usize,
        tap: usize,
        into: *mut f32,
    ) {
        let sizes = self.sizes;
        let line = self.line();
        let columns = line / sizes.lanes;
        // SAFETY: the caller's bounds.
        unsafe {
            for y in 0..sizes.pool {
                let top = (row * sizes.pool + y) * sizes.stride[0] * sizes.padded[1];
                for column in 0..columns {
                    let base = into.add((top + column * sizes.stride[1]) * sizes.lanes);
                    let dense = self.dense.as_ptr().add(y * line + column * sizes.lanes);
                    let mut lane = 0;
                    while lane + PAIR * S::F32_LANES <= sizes.lanes {
                        self.scatter::<S, U, PAIR>(simd, tap, dense.add(lane), base.add(lane));
                        lane += PAIR * S::F32_LANES;
                    }
                    while lane < sizes.lanes {
                        self.scatter::<S, U, 1>(simd, tap, dense.add(lane), base.add(lane));
                        lane += S::F32_LANES;
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scatter<S: Simd, const U: usize, const V: usize>(
        &self,
        simd: S,
        tap: usize,
        mut dense: *const f32,
        base: *mut f32,
    ) {
        let outputs = self.sizes.channels[1];
        let plane = self.sizes.pool * self.line();
        let mut sums = [[simd.splat_f32s(0.0); V]; U];
        // SAFETY: the caller's bounds.
        unsafe {
            let mut weight = self.packed.as_ptr().add(tap * outputs);
            for _ in 0..outputs {
                let mut values = [simd.splat_f32s(0.0); V];
                for (v, value) in values.iter_mut().enumerate() {
                    *value = load(simd, dense.add(v * S::F32_LANES));
                }
                for (u, sum) in sums.iter_mut().enumerate() {
                    let factor = simd.splat_f32s(*weight.add(u));
                    for v in 0..V {
                        sum[v] = simd.mul_add_e_f32s(factor, values[v], sum[v]);
                    }
                }
                weight = weight.add(U);
                dense = dense.add(plane);
            }
            for (u, sum) in sums.iter().enumerate() {
                let pixel = base.add(*self.offsets.get_unchecked(tap + u));
                for (v, &sum) in sum.iter().enumerate() {
                    let total = pixel.add(v * S::F32_LANES);
                    store(total, simd.add_f32s(load(simd, total), sum));
                }
            }
        }
    }
}
