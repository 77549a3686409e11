//! Brings a figure drawn with anything on anything into MNIST's form: light ink on black, 20 pixels
//! on its longer side, its mass in the middle of 28.
//!
//! A photograph of a figure differs from that in its light, which falls off to a side; in what is
//! dark and what is light; in noise, size and place; and in how broad the strokes are. Each is
//! undone in turn, and the last ones at five times the final size, so that the small picture gets
//! the soft edges that MNIST's have.

use image::GrayImage;

use crate::picture::shrink;

/// The longer side of the figure, at five times the final size of MNIST's 20 of 28 pixels.
const FIGURE: f32 = 100.0;
const OVERSAMPLE: usize = 5;

/// The longer side of what is looked at: finer detail does not survive anyway.
const WORKING_SIDE: u32 = 256;

/// How broad MNIST's strokes are, in parts of the figure's longer side.
const STROKE: f32 = 0.125;

/// A grid of numbers.
struct Plane {
    width: usize,
    height: usize,
    values: Vec<f32>,
}

impl Plane {
    fn new(width: usize, height: usize) -> Self {
        Self { width, height, values: vec![0.0; width * height] }
    }

    /// The value at a place between four pixels; nothing lies outside.
    fn at(&self, x: f32, y: f32) -> f32 {
        let (left, top) = (x.floor(), y.floor());
        let pixel = |x: f32, y: f32| {
            let inside = x >= 0.0 && y >= 0.0 && x < self.width as f32 && y < self.height as f32;
            if inside { self.values[y as usize * self.width + x as usize] } else { 0.0 }
        };
        let (right, down) = (x - left, y - top);
        let upper = pixel(left, top) * (1.0 - right) + pixel(left + 1.0, top) * right;
        let lower = pixel(left, top + 1.0) * (1.0 - right) + pixel(left + 1.0, top + 1.0) * right;
        upper * (1.0 - down) + lower * down
    }
}

/// The figure as bytes of `height` x `width`; `None` where there is none.
pub(crate) fn fit(picture: &GrayImage, height: usize, width: usize) -> Option<Vec<u8>> {
    let mut plane = lift(picture)?;
    keep_figure(&mut plane);
    let figure = cut_out(&plane)?;
    Some(place(&broaden(figure), height, width))
}

/// Takes the ground away, turns the ink light, and stretches it from 0 to 1.
fn lift(picture: &GrayImage) -> Option<Plane> {
    let small = shrink(picture, WORKING_SIDE);
    let (width, height) = (small.width() as usize, small.height() as usize);
    let values: Vec<f32> = small.as_raw().iter().map(|&byte| f32::from(byte) / 255.0).collect();
    let mut plane = Plane { width, height, values };
    let noise = subtract_ground(&mut plane);
    // Noise goes both ways alike, ink goes one.
    let leaning: f64 = plane.values.iter().map(|&value| f64::from(value).powi(3)).sum();
    if leaning < 0.0 {
        plane.values.iter_mut().for_each(|value| *value = -*value);
    }
    let threshold = otsu(&plane.values);
    let mut inked: Vec<f32> =
        plane.values.iter().copied().filter(|&value| value > threshold).collect();
    let middle = inked.len() / 2;
    if inked.is_empty() {
        return None;
    }
    let level = *inked.select_nth_unstable_by(middle, f32::total_cmp).1;
    if level < 0.05 || level < 4.0 * noise {
        return None;
    }
    for value in &mut plane.values {
        *value = ((*value / level - 0.3) / 0.5).clamp(0.0, 1.0);
    }
    Some(plane)
}

/// Subtracts the ground: a surface with a slope and a bend, fitted again and again with less and
/// less weight for what lies far from it, which is the ink. Returns how far the ground itself lies
/// from the surface.
fn subtract_ground(plane: &mut Plane) -> f32 {
    let (width, height) = (plane.width, plane.height);
    let scale = |at: usize, side: usize| {
        if side < 2 { 0.0 } else { 2.0 * at as f64 / (side - 1) as f64 - 1.0 }
    };
    let terms = |x: usize, y: usize| {
        let (x, y) = (scale(x, width), scale(y, height));
        [1.0, x, y, x * x, x * y, y * y]
    };
    let step = (width * height / 1024).max(1).isqrt().max(1);
    let rim = (width.min(height) / 12).max(1);
    let mut samples = Vec::new();
    for y in (0..height).step_by(step) {
        for x in (0..width).step_by(step) {
            let at_rim = x < rim || y < rim || x + rim >= width || y + rim >= height;
            let value = f64::from(plane.values[y * width + x]);
            samples.push((terms(x, y), value, at_rim));
        }
    }
    // Starts level, at what is usual along the rim.
    let rim_values = samples.iter().filter(|sample| sample.2).map(|sample| sample.1);
    let mut surface = [median(rim_values.collect()), 0.0, 0.0, 0.0, 0.0, 0.0];
    let height_at = |surface: &[f64; 6], terms: &[f64; 6]| -> f64 {
        surface.iter().zip(terms).map(|(a, b)| a * b).sum()
    };
    let mut spread = 0.0;
    for round in 0..8 {
        let away =
            |sample: &([f64; 6], f64, bool)| (sample.1 - height_at(&surface, &sample.0)).abs();
        spread = median(samples.iter().map(away).collect()).max(0.004) * 1.5;
        // Begins generously: the light may fall off far.
        let width = spread.max(0.08 / f64::from(round + 1));
        let mut normal = [[0.0; 7]; 6];
        for sample in &samples {
            let relative = away(sample) / width;
            let mut weight = 1.0 / (1.0 + relative * relative).powi(2);
            if sample.2 {
                weight *= 3.0;
            }
            for (row, term) in normal.iter_mut().zip(&sample.0) {
                for (cell, other) in row.iter_mut().zip(&sample.0) {
                    *cell += weight * term * other;
                }
                row[6] += weight * term * sample.1;
            }
        }
        // The light touch keeps a bend out that nothing speaks for, and the sums solvable.
        for (at, row) in normal.iter_mut().enumerate() {
            row[at] += 1e-3 * samples.len() as f64 * if at == 0 { 1e-3 } else { 1.0 };
        }
        surface = solve(normal);
    }
    for y in 0..height {
        for x in 0..width {
            plane.values[y * width + x] -= height_at(&surface, &terms(x, y)) as f32;
        }
    }
    spread as f32
}

fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    if values.is_empty() {
        return 0.0;
    }
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

/// Gauss's elimination, with pivots.
fn solve(mut rows: [[f64; 7]; 6]) -> [f64; 6] {
    for at in 0..6 {
        let pivot = (at..6).max_by(|&a, &b| rows[a][at].abs().total_cmp(&rows[b][at].abs()));
        rows.swap(at, pivot.unwrap_or(at));
        if rows[at][at].abs() < 1e-12 {
            continue;
        }
        let pivot_row = rows[at];
        for (below, row) in rows.iter_mut().enumerate() {
            if below != at {
                let factor = row[at] / pivot_row[at];
                for (cell, value) in row.iter_mut().zip(pivot_row) {
                    *cell -= factor * value;
                }
            }
        }
    }
    std::array::from_fn(
        |at| {
            if rows[at][at].abs() < 1e-12 { 0.0 } else { rows[at][6] / rows[at][at] }
        },
    )
}

/// The value that best parts the positive ones in two (Otsu's).
fn otsu(values: &[f32]) -> f32 {
    const BINS: usize = 128;
    let highest = values.iter().copied().fold(0.0f32, f32::max);
    if highest <= 0.0 {
        return 0.0;
    }
    let mut counts = [0.0f64; BINS];
    for &value in values {
        let bin = (value.max(0.0) / highest * (BINS - 1) as f32) as usize;
        counts[bin.min(BINS - 1)] += 1.0;
    }
    let total: f64 = counts.iter().sum();
    let whole: f64 = counts.iter().enumerate().map(|(bin, count)| bin as f64 * count).sum();
    let (mut below, mut sum, mut best, mut at) = (0.0, 0.0, -1.0, 0);
    for (bin, count) in counts.iter().enumerate() {
        below += count;
        sum += bin as f64 * count;
        let above = total - below;
        if below > 0.0 && above > 0.0 {
            let apart = sum / below - (whole - sum) / above;
            let between = below * above * apart * apart;
            if between > best {
                (best, at) = (between, bin);
            }
        }
    }
    (at as f32 + 0.5) / (BINS - 1) as f32 * highest
}

/// Removes specks: what hangs together and is small beside the largest.
fn keep_figure(plane: &mut Plane) {
    let (width, height) = (plane.width, plane.height);
    let mut part_of = vec![0u32; width * height];
    let mut sizes = vec![0usize];
    let mut open = Vec::new();
    for start in 0..part_of.len() {
        if part_of[start] != 0 || plane.values[start] <= 0.5 {
            continue;
        }
        let part = sizes.len() as u32;
        sizes.push(0);
        part_of[start] = part;
        open.push(start);
        while let Some(at) = open.pop() {
            sizes[part as usize] += 1;
            for near in around(at, width, height, 1) {
                if part_of[near] == 0 && plane.values[near] > 0.5 {
                    part_of[near] = part;
                    open.push(near);
                }
            }
        }
    }
    let largest = sizes.iter().copied().max().unwrap_or(0);
    let kept = |part: u32| part != 0 && sizes[part as usize] * 20 >= largest;
    // The soft edge of the figure is part of it.
    let mut figure = vec![false; plane.values.len()];
    for at in (0..part_of.len()).filter(|&at| kept(part_of[at])) {
        for near in around(at, width, height, 2) {
            figure[near] = true;
        }
    }
    for (value, part) in plane.values.iter_mut().zip(figure) {
        if !part {
            *value = 0.0;
        }
    }
}

/// The pixels around one, itself included.
fn around(at: usize, width: usize, height: usize, reach: usize) -> impl Iterator<Item = usize> {
    let (x, y) = (at % width, at / width);
    let rows = y.saturating_sub(reach)..=(y + reach).min(height - 1);
    let columns = x.saturating_sub(reach)..=(x + reach).min(width - 1);
    rows.flat_map(move |row| columns.clone().map(move |column| row * width + column))
}

/// The figure alone, enlarged or reduced to `FIGURE` on its longer side.
fn cut_out(plane: &Plane) -> Option<Plane> {
    let inked = (0..plane.values.len()).filter(|&at| plane.values[at] > 0.5);
    let (mut left, mut top, mut right, mut bottom) = (usize::MAX, usize::MAX, 0, 0);
    for at in inked {
        let (x, y) = (at % plane.width, at / plane.width);
        (left, top) = (left.min(x), top.min(y));
        (right, bottom) = (right.max(x), bottom.max(y));
    }
    if left > right {
        return None;
    }
    let (across, down) = ((right - left + 1) as f32, (bottom - top + 1) as f32);
    let per_pixel = across.max(down) / FIGURE;
    let side = |length: f32| (length / per_pixel).round().max(1.0) as usize;
    let mut figure = Plane::new(side(across), side(down));
    let (width, height) = (figure.width, figure.height);
    // Nine looks at each pixel, so that reducing averages.
    let looks = [-1.0 / 3.0, 0.0, 1.0 / 3.0];
    for y in 0..height {
        for x in 0..width {
            let mut sum = 0.0;
            for dy in looks {
                for dx in looks {
                    let from_x = left as f32 + (x as f32 + 0.5 + dx) * per_pixel - 0.5;
                    let from_y = top as f32 + (y as f32 + 0.5 + dy) * per_pixel - 0.5;
                    sum += plane.at(from_x, from_y);
                }
            }
            figure.values[y * width + x] = sum / 9.0;
        }
    }
    Some(figure)
}

/// How broad the strokes are: an area that is all stroke has two edges along its length.
fn stroke(figure: &Plane) -> f32 {
    let inked = |x: isize, y: isize| {
        let inside = x >= 0 && y >= 0 && x < figure.width as isize && y < figure.height as isize;
        inside && figure.values[y as usize * figure.width + x as usize] > 0.5
    };
    let (mut area, mut edges) = (0.0f32, 0.0f32);
    for y in 0..figure.height as isize {
        for x in 0..figure.width as isize {
            if inked(x, y) {
                area += 1.0;
                for (dx, dy) in [(1, 0), (-1, 0), (0, 1), (0, -1)] {
                    edges += f32::from(u8::from(!inked(x + dx, y + dy)));
                }
            }
        }
    }
    // Stairs are longer than the slope they climb: by 4/π on average over all directions.
    2.0 * area / (edges * std::f32::consts::FRAC_PI_4).max(1.0)
}

/// Makes strokes as broad as MNIST's where a pen was thin, and thinner where it was very broad.
fn broaden(figure: Plane) -> Plane {
    let wanted = STROKE * FIGURE;
    let broad = stroke(&figure);
    let missing = (wanted - broad) / 2.0;
    let surplus = (broad - 1.7 * wanted) / 2.0;
    let reach = if missing > 1.0 {
        missing.round() as usize
    } else if surplus > 1.0 && figure.width.min(figure.height) > 40 {
        surplus.round() as usize
    } else {
        return figure;
    };
    let grow = missing > 1.0;
    let pad = if grow { reach } else { 0 };
    let mut wide = Plane::new(figure.width + 2 * pad, figure.height + 2 * pad);
    let near: Vec<(isize, isize)> = {
        let reach = reach as isize;
        (-reach..=reach)
            .flat_map(|dy| (-reach..=reach).map(move |dx| (dx, dy)))
            .filter(|(dx, dy)| dx * dx + dy * dy <= reach * reach)
            .collect()
    };
    let value = |x: isize, y: isize| {
        let inside = x >= 0 && y >= 0 && x < figure.width as isize && y < figure.height as isize;
        if inside { figure.values[y as usize * figure.width + x as usize] } else { 0.0 }
    };
    let (width, pad) = (wide.width, pad as isize);
    for (at, cell) in wide.values.iter_mut().enumerate() {
        let (x, y) = ((at % width) as isize - pad, (at / width) as isize - pad);
        let values = near.iter().map(|(dx, dy)| value(x + dx, y + dy));
        *cell = if grow { values.fold(0.0, f32::max) } else { values.fold(1.0, f32::min) };
    }
    wide
}

/// Puts the figure's mass into the middle, and averages down to the final size.
fn place(figure: &Plane, height: usize, width: usize) -> Vec<u8> {
    let (mut mass, mut across, mut down) = (0.0f32, 0.0f32, 0.0f32);
    for y in 0..figure.height {
        for x in 0..figure.width {
            let value = figure.values[y * figure.width + x];
            mass += value;
            across += value * (x as f32 + 0.5);
            down += value * (y as f32 + 0.5);
        }
    }
    let (centre_x, centre_y) = (across / mass.max(1e-6), down / mass.max(1e-6));
    // 20 of MNIST's 28 pixels, whatever the model's own side is.
    let fine = (height.min(width) * OVERSAMPLE) as f32;
    let scale = figure.width.max(figure.height) as f32 / (fine * 20.0 / 28.0);
    let mut bytes = Vec::with_capacity(height * width);
    for y in 0..height {
        for x in 0..width {
            let mut sum = 0.0;
            for dy in 0..OVERSAMPLE {
                for dx in 0..OVERSAMPLE {
                    let from = |at: usize, offset: usize, side: usize, centre: f32| {
                        let middle = (side * OVERSAMPLE) as f32 / 2.0;
                        ((at * OVERSAMPLE + offset) as f32 + 0.5 - middle) * scale + centre - 0.5
                    };
                    sum += figure.at(from(x, dx, width, centre_x), from(y, dy, height, centre_y));
                }
            }
            let mean = sum / (OVERSAMPLE * OVERSAMPLE) as f32;
            bytes.push((mean * 255.0).round().clamp(0.0, 255.0) as u8);
        }
    }
    bytes
}
