//! Curves in a terminal: dots of Braille, eight to a character.

/// Curves on top of each other; the later one is in front.
pub(super) struct Plot {
    width: usize,
    height: usize,
    /// For each character its dots and the curve in front.
    cells: Vec<(u8, usize)>,
}

/// The bit of each dot, by row and column.
const DOTS: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];

impl Plot {
    /// So many characters wide and high.
    pub(super) fn new(width: usize, height: usize) -> Self {
        Self { width, height, cells: vec![(0, 0); width * height] }
    }

    /// Adds a line through points, or the only point; coordinates from 0 to 1. `curve` is from 1.
    pub(super) fn line(&mut self, curve: usize, points: &[(f64, f64)]) {
        let (columns, rows) = ((self.width * 2) as f64 - 1.0, (self.height * 4) as f64 - 1.0);
        if let [only] = points {
            return self.line(curve, &[*only, *only]);
        }
        for pair in points.windows(2) {
            let [(x0, y0), (x1, y1)] = [pair[0], pair[1]]
                .map(|(x, y)| (x.clamp(0.0, 1.0) * columns, (1.0 - y.clamp(0.0, 1.0)) * rows));
            let steps = ((x1 - x0).abs().max((y1 - y0).abs()).ceil() as usize).max(1);
            for step in 0..=steps {
                let share = step as f64 / steps as f64;
                self.dot(curve, x0 + (x1 - x0) * share, y0 + (y1 - y0) * share);
            }
        }
    }

    fn dot(&mut self, curve: usize, x: f64, y: f64) {
        let (x, y) = (x.round() as usize, y.round() as usize);
        let cell = &mut self.cells[y / 4 * self.width + x / 2];
        // Two curves in one character would take each other's colour.
        if cell.1 < curve {
            *cell = (0, curve);
        }
        cell.0 |= DOTS[y % 4][x % 2];
    }

    /// One row, from the top: stretches of characters with their curve, 0 for none.
    pub(super) fn row(&self, row: usize) -> Vec<(usize, String)> {
        let mut stretches: Vec<(usize, String)> = Vec::new();
        for &(dots, curve) in &self.cells[row * self.width..(row + 1) * self.width] {
            let curve = if dots == 0 { 0 } else { curve };
            let character = if dots == 0 {
                ' '
            } else {
                char::from_u32(0x2800 + u32::from(dots)).unwrap_or(' ')
            };
            match stretches.last_mut() {
                Some((last, text)) if *last == curve => text.push(character),
                _ => stretches.push((curve, character.to_string())),
            }
        }
        stretches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_rises_from_corner_to_corner_and_the_later_one_is_in_front() {
        let mut plot = Plot::new(4, 2);
        plot.line(1, &[(0.0, 0.0), (1.0, 1.0)]);
        let rows: Vec<String> =
            (0..2).map(|row| plot.row(row).into_iter().map(|(_, text)| text).collect()).collect();
        assert_eq!(rows, ["  ⡠⠊", "⡠⠊  "]);
        plot.line(2, &[(0.0, 0.0), (0.5, 0.5)]);
        assert_eq!(plot.row(1)[0].0, 2);
        assert_eq!(plot.row(0).last().map(|(curve, _)| *curve), Some(1));
    }
}
