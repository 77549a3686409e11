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

/// Output channels, and vectors of samples, whose sums are in registers together.
const FORWARD_TILE: usize = 6;
const PAIR: usize = 2;

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
        let mut packed = vec![0.0f32; taps * FORWARD_TILE];
        let mut first = 0;
        while first < outputs {
            let tile = FORWARD_TILE.min(outputs - first);
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

/// Taps whose input gradients are in registers together.
const SCATTER_TILE: usize = 6;

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
        let tile = SCATTER_TILE.min(taps - first);
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
        let whole = taps / SCATTER_TILE * SCATTER_TILE;
        // SAFETY: the caller's bounds.
        unsafe {
            let into = input_gradient.as_mut_ptr();
            for tap in (0..whole).step_by(SCATTER_TILE) {
                self.inputs_of::<S, SCATTER_TILE>(simd, row, tap, into);
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
