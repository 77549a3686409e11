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

/// A ground is at least so uneven: one step of a byte.
const LEAST_SPREAD: f64 = 0.004;

/// What differs less than this from a level is the level.
const FLAT: f64 = 0.002;

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

    /// Another grid, each pixel the mean of several looks at this one. A look between pixels takes
    /// from those around it, across and down alike, so the two are done one after the other.
    fn resample(&self, columns: &Looks, rows: &Looks) -> Self {
        let (width, height) = (columns.pixels(), rows.pixels());
        let mut narrow = Self::new(width, self.height);
        let lines = narrow.values.chunks_exact_mut(width).zip(self.values.chunks_exact(self.width));
        for (to, from) in lines {
            for (cell, looks) in to.iter_mut().zip(columns.each()) {
                let look = |look: &Look| {
                    from[look.near] * look.near_share + from[look.far] * look.far_share
                };
                *cell = looks.iter().map(look).sum();
            }
        }
        let mut done = Self::new(width, height);
        let line = |at: usize| &narrow.values[at * width..(at + 1) * width];
        let share = 1.0 / (columns.per_pixel * rows.per_pixel) as f32;
        for (to, looks) in done.values.chunks_exact_mut(width).zip(rows.each()) {
            for look in looks {
                for ((cell, near), far) in to.iter_mut().zip(line(look.near)).zip(line(look.far)) {
                    *cell += near * look.near_share + far * look.far_share;
                }
            }
            to.iter_mut().for_each(|cell| *cell *= share);
        }
        done
    }
}

/// A look at a place between two pixels of a line.
struct Look {
    near: usize,
    far: usize,
    near_share: f32,
    far_share: f32,
}

/// Several looks for each pixel of a new line at those of an old one.
struct Looks {
    looks: Vec<Look>,
    per_pixel: usize,
}

impl Looks {
    /// `place` says where on the old line, which has `side` pixels, a look of a new pixel falls.
    /// Nothing lies outside.
    fn new(
        pixels: usize,
        per_pixel: usize,
        side: usize,
        place: impl Fn(usize, usize) -> f32,
    ) -> Self {
        let look = |at: usize| {
            let place = place(at / per_pixel, at % per_pixel);
            let before = place.floor();
            let share = |pixel: f32, share: f32| {
                if pixel >= 0.0 && pixel < side as f32 { (pixel as usize, share) } else { (0, 0.0) }
            };
            let (near, near_share) = share(before, 1.0 - (place - before));
            let (far, far_share) = share(before + 1.0, place - before);
            Look { near, far, near_share, far_share }
        };
        Self { looks: (0..pixels * per_pixel).map(look).collect(), per_pixel }
    }

    fn pixels(&self) -> usize {
        self.looks.len() / self.per_pixel
    }

    fn each(&self) -> impl Iterator<Item = &[Look]> {
        self.looks.chunks_exact(self.per_pixel)
    }
}

/// The figure as bytes of `height` x `width`; `None` where there is none.
pub(crate) fn fit(picture: &GrayImage, height: usize, width: usize) -> Option<Vec<u8>> {
    if is_in_form(picture, height, width) {
        return Some(picture.as_raw().clone());
    }
    let mut plane = lift(picture)?;
    keep_figure(&mut plane);
    let figure = cut_out(&plane)?;
    Some(place(&broaden(figure), height, width))
}

/// Whether a picture has MNIST's form already: of its size, light ink on plain black, about 20 of 28
/// pixels on its longer side, with its mass in the middle. Such a one is best left alone.
fn is_in_form(picture: &GrayImage, height: usize, width: usize) -> bool {
    if (picture.height() as usize, picture.width() as usize) != (height, width) {
        return false;
    }
    let (mut mass, mut rows, mut columns, mut brightest) = (0.0f32, 0.0, 0.0, 0);
    let (mut first, mut last) = ([usize::MAX; 2], [0; 2]);
    for (at, &byte) in picture.as_raw().iter().enumerate().filter(|(_, byte)| **byte > 0) {
        let (row, column, weight) = (at / width, at % width, f32::from(byte));
        mass += weight;
        rows += weight * row as f32;
        columns += weight * column as f32;
        brightest = brightest.max(byte);
        first = [first[0].min(row), first[1].min(column)];
        last = [last[0].max(row), last[1].max(column)];
    }
    if brightest < 200 {
        return false;
    }
    let longer = (last[0] - first[0]).max(last[1] - first[1]) + 1;
    let is_fitting = |side: usize| (side * 9..=side * 10).contains(&(longer * 14));
    let is_central = |sum: f32, side: usize| (sum / mass - (side as f32 - 1.0) / 2.0).abs() <= 1.0;
    is_fitting(height.max(width)) && is_central(rows, height) && is_central(columns, width)
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
    let level = median(rim_values.collect());
    // What was drawn by a program lies on a ground without light or grain: there is nothing to fit.
    let flat = |sample: &&([f64; 6], f64, bool)| (sample.1 - level).abs() < FLAT;
    let even_rim = samples.iter().filter(|sample| sample.2).all(|sample| flat(&sample));
    if even_rim && samples.iter().filter(flat).count() * 2 > samples.len() {
        plane.values.iter_mut().for_each(|value| *value -= level as f32);
        return (LEAST_SPREAD * 1.5) as f32;
    }
    let mut surface = [level, 0.0, 0.0, 0.0, 0.0, 0.0];
    let height_at = |surface: &[f64; 6], terms: &[f64; 6]| -> f64 {
        surface.iter().zip(terms).map(|(a, b)| a * b).sum()
    };
    let mut spread = 0.0;
    for round in 0..8 {
        let away =
            |sample: &([f64; 6], f64, bool)| (sample.1 - height_at(&surface, &sample.0)).abs();
        spread = median(samples.iter().map(away).collect()).max(LEAST_SPREAD) * 1.5;
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
    // Three looks across and down for each pixel, so that reducing averages.
    let line = |start: usize, length: f32, of: usize| {
        Looks::new(side(length), 3, of, |pixel, look| {
            let offset = (look as f32 - 1.0) / 3.0;
            start as f32 + (pixel as f32 + 0.5 + offset) * per_pixel - 0.5
        })
    };
    Some(plane.resample(&line(left, across, plane.width), &line(top, down, plane.height)))
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
    if !grow {
        wide.values.fill(1.0);
    }
    let bound = reach as isize;
    for dy in -bound..=bound {
        // A disc, line by line: as far to the sides as its height allows here.
        let across = ((bound * bound - dy * dy) as f64).sqrt() as isize;
        for dx in -across..=across {
            spread(&figure, &mut wide, [dx + pad as isize, dy + pad as isize], grow);
        }
    }
    wide
}

/// Takes the higher values (or the lower ones) of `figure`, moved by `by`, over into `wide`. Around
/// the figure there is nothing.
fn spread(figure: &Plane, wide: &mut Plane, [dx, dy]: [isize; 2], higher: bool) {
    for y in 0..wide.height {
        let line = &mut wide.values[y * wide.width..(y + 1) * wide.width];
        let from = y as isize - dy;
        let source = if from >= 0 && (from as usize) < figure.height {
            let from = from as usize * figure.width;
            &figure.values[from..from + figure.width]
        } else {
            &[]
        };
        // Where the moved line begins and ends in this one.
        let begin = dx.clamp(0, line.len() as isize) as usize;
        let end = (dx + source.len() as isize).clamp(begin as isize, line.len() as isize) as usize;
        let source = source.get((begin as isize - dx) as usize..).unwrap_or_default();
        if higher {
            for (cell, value) in line[begin..end].iter_mut().zip(source) {
                *cell = cell.max(*value);
            }
        } else {
            line[..begin].fill(0.0);
            line[end..].fill(0.0);
            for (cell, value) in line[begin..end].iter_mut().zip(source) {
                *cell = cell.min(*value);
            }
        }
    }
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
    let line = |side: usize, centre: f32, of: usize| {
        let middle = (side * OVERSAMPLE) as f32 / 2.0;
        Looks::new(side, OVERSAMPLE, of, |pixel, look| {
            ((pixel * OVERSAMPLE + look) as f32 + 0.5 - middle) * scale + centre - 0.5
        })
    };
    let columns = line(width, centre_x, figure.width);
    let small = figure.resample(&columns, &line(height, centre_y, figure.height));
    small.values.iter().map(|mean| (mean * 255.0).round().clamp(0.0, 255.0) as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digits() -> Vec<GrayImage> {
        let test = crate::mnist::open("mnist").expect("is built in").test;
        let images = test.column("image").expect("pictures");
        let each = images.bytes.chunks_exact(28 * 28);
        each.map(|bytes| GrayImage::from_raw(28, 28, bytes.to_vec()).expect("a picture")).collect()
    }

    #[test]
    fn what_is_in_the_form_stays_as_it_is_and_what_is_not_is_brought_there() {
        let digits = digits();
        let kept =
            digits.iter().filter(|digit| fit(digit, 28, 28).as_ref() == Some(digit.as_raw()));
        let kept = kept.count();
        assert!(kept * 100 >= digits.len() * 95, "{kept} of {}", digits.len());
        for digit in digits.iter().take(20) {
            let mut turned = digit.clone();
            image::imageops::invert(&mut turned);
            assert!(!is_in_form(&turned, 28, 28), "dark on light");
            let moved = image::imageops::crop_imm(digit, 3, 3, 25, 25).to_image();
            let mut corner = GrayImage::new(28, 28);
            image::imageops::replace(&mut corner, &moved, 0, 0);
            assert!(!is_in_form(&corner, 28, 28), "away from the middle");
            assert!(fit(&corner, 28, 28).is_some_and(|fitted| fitted != *corner.as_raw()));
        }
    }
}
