//! Digits drawn stroke by stroke into pictures that look like photographs: any size, paper and
//! pen, light that falls off to a side, noise, a hand that is not quite straight.

use std::io::Cursor;

use image::{DynamicImage, ImageFormat, Rgb, RgbImage};

type Point = (f32, f32);

/// Where a hand goes to write each digit, in a square of side 1; curves run through the points.
const DIGITS: [&[&[Point]]; 10] = [
    &[&[
        (0.52, 0.14),
        (0.36, 0.22),
        (0.28, 0.42),
        (0.29, 0.64),
        (0.38, 0.82),
        (0.52, 0.86),
        (0.66, 0.78),
        (0.73, 0.58),
        (0.71, 0.36),
        (0.62, 0.19),
        (0.52, 0.14),
    ]],
    &[&[(0.4, 0.3), (0.54, 0.15)], &[(0.54, 0.15), (0.53, 0.5), (0.52, 0.86)]],
    &[
        &[
            (0.28, 0.34),
            (0.34, 0.2),
            (0.5, 0.14),
            (0.65, 0.21),
            (0.68, 0.36),
            (0.6, 0.52),
            (0.44, 0.69),
            (0.27, 0.85),
        ],
        &[(0.27, 0.85), (0.5, 0.84), (0.75, 0.85)],
    ],
    &[&[
        (0.29, 0.22),
        (0.44, 0.14),
        (0.61, 0.17),
        (0.68, 0.3),
        (0.6, 0.43),
        (0.44, 0.48),
        (0.61, 0.53),
        (0.71, 0.67),
        (0.64, 0.81),
        (0.46, 0.87),
        (0.28, 0.79),
    ]],
    &[&[(0.42, 0.14), (0.26, 0.58)], &[(0.26, 0.58), (0.76, 0.57)], &[(0.64, 0.33), (0.6, 0.87)]],
    &[
        &[(0.7, 0.15), (0.36, 0.16)],
        &[(0.36, 0.16), (0.32, 0.46)],
        &[
            (0.32, 0.46),
            (0.46, 0.4),
            (0.62, 0.45),
            (0.71, 0.58),
            (0.68, 0.74),
            (0.54, 0.85),
            (0.38, 0.85),
            (0.27, 0.77),
        ],
    ],
    &[&[
        (0.64, 0.13),
        (0.48, 0.24),
        (0.35, 0.42),
        (0.29, 0.62),
        (0.34, 0.78),
        (0.48, 0.87),
        (0.63, 0.82),
        (0.69, 0.68),
        (0.61, 0.55),
        (0.46, 0.54),
        (0.33, 0.64),
    ]],
    &[&[(0.27, 0.17), (0.72, 0.16)], &[(0.72, 0.16), (0.58, 0.46), (0.45, 0.87)]],
    &[&[
        (0.66, 0.25),
        (0.52, 0.14),
        (0.37, 0.19),
        (0.35, 0.34),
        (0.49, 0.46),
        (0.64, 0.58),
        (0.69, 0.72),
        (0.58, 0.86),
        (0.41, 0.86),
        (0.31, 0.73),
        (0.37, 0.58),
        (0.52, 0.46),
        (0.64, 0.37),
        (0.66, 0.25),
    ]],
    &[&[
        (0.67, 0.32),
        (0.57, 0.17),
        (0.42, 0.17),
        (0.33, 0.3),
        (0.38, 0.45),
        (0.52, 0.49),
        (0.64, 0.4),
        (0.67, 0.32),
        (0.65, 0.58),
        (0.58, 0.87),
    ]],
];

/// What a picture is taken of, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene {
    pub(crate) size: (u32, u32),
    pub(crate) paper: [f32; 3],
    pub(crate) ink: [f32; 3],
    /// Of the digit's height.
    pub(crate) pen: f32,
    /// The digit's height, of the picture's smaller side.
    pub(crate) height: f32,
    /// Where its middle is.
    pub(crate) middle: Point,
    pub(crate) degrees: f32,
    /// How much light is lost from one corner to the other.
    pub(crate) shade: f32,
    /// The spread of each pixel's error.
    pub(crate) noise: f32,
}

pub(crate) const PLAIN: Scene = Scene {
    size: (400, 400),
    paper: [1.0, 1.0, 1.0],
    ink: [0.0, 0.0, 0.0],
    pen: 0.1,
    height: 0.8,
    middle: (0.5, 0.5),
    degrees: 0.0,
    shade: 0.0,
    noise: 0.0,
};

/// Ten ways in which a digit reaches a camera.
#[allow(dead_code)] // Not every test binary draws them all.
pub(crate) const SCENES: [(&str, Scene); 10] = [
    ("black on white", PLAIN),
    ("white on black", Scene { paper: [0.0; 3], ink: [1.0; 3], size: (280, 280), ..PLAIN }),
    (
        "blue ballpoint on yellow paper, by a window",
        Scene {
            size: (800, 600),
            paper: [0.95, 0.91, 0.74],
            ink: [0.12, 0.18, 0.55],
            pen: 0.035,
            height: 0.6,
            middle: (0.45, 0.52),
            degrees: 6.0,
            shade: 0.35,
            noise: 0.02,
        },
    ),
    (
        "chalk on a green board",
        Scene {
            size: (640, 480),
            paper: [0.14, 0.3, 0.22],
            ink: [0.88, 0.9, 0.84],
            pen: 0.07,
            height: 0.7,
            middle: (0.55, 0.48),
            degrees: -5.0,
            shade: 0.25,
            noise: 0.05,
        },
    ),
    (
        "a marker on a tall sheet",
        Scene {
            size: (300, 700),
            ink: [0.7, 0.1, 0.12],
            pen: 0.16,
            height: 0.9,
            middle: (0.5, 0.35),
            degrees: 4.0,
            shade: 0.2,
            noise: 0.03,
            ..PLAIN
        },
    ),
    (
        "pencil in poor light",
        Scene {
            size: (500, 500),
            paper: [0.55, 0.53, 0.5],
            ink: [0.3, 0.3, 0.31],
            pen: 0.05,
            height: 0.65,
            middle: (0.5, 0.5),
            degrees: -7.0,
            shade: 0.4,
            noise: 0.03,
        },
    ),
    ("a small picture", Scene { size: (40, 48), pen: 0.12, noise: 0.02, ..PLAIN }),
    (
        "a small digit on a large sheet",
        Scene {
            size: (800, 800),
            height: 0.22,
            middle: (0.7, 0.25),
            pen: 0.1,
            noise: 0.02,
            ..PLAIN
        },
    ),
    (
        "yellow on violet",
        Scene {
            size: (350, 300),
            paper: [0.3, 0.1, 0.4],
            ink: [0.95, 0.85, 0.2],
            degrees: 8.0,
            shade: 0.3,
            noise: 0.04,
            ..PLAIN
        },
    ),
    (
        "grey on grey, in grain",
        Scene {
            size: (450, 450),
            paper: [0.7; 3],
            ink: [0.45; 3],
            degrees: -8.0,
            shade: 0.15,
            noise: 0.06,
            ..PLAIN
        },
    ),
];

/// A curve through the points, as short lines (Catmull and Rom's).
fn curve(points: &[Point]) -> Vec<Point> {
    if points.len() == 2 {
        return points.to_vec();
    }
    let at = |index: isize| points[index.clamp(0, points.len() as isize - 1) as usize];
    let mut line = Vec::new();
    for segment in 0..points.len() as isize - 1 {
        let [a, b, c, d] = [-1, 0, 1, 2].map(|offset| at(segment + offset));
        for step in 0..6 {
            let t = step as f32 / 6.0;
            let blend = |a: f32, b: f32, c: f32, d: f32| {
                0.5 * (2.0 * b
                    + (c - a) * t
                    + (2.0 * a - 5.0 * b + 4.0 * c - d) * t * t
                    + (3.0 * b - a - 3.0 * c + d) * t * t * t)
            };
            line.push((blend(a.0, b.0, c.0, d.0), blend(a.1, b.1, c.1, d.1)));
        }
    }
    line.push(at(points.len() as isize - 1));
    line
}

fn distance(point: Point, from: Point, to: Point) -> f32 {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let length = dx * dx + dy * dy;
    let along = if length == 0.0 {
        0.0
    } else {
        (((point.0 - from.0) * dx + (point.1 - from.1) * dy) / length).clamp(0.0, 1.0)
    };
    (point.0 - from.0 - along * dx).hypot(point.1 - from.1 - along * dy)
}

/// A picture of a digit.
pub(crate) fn draw(digit: usize, scene: &Scene) -> RgbImage {
    let (width, height) = scene.size;
    let side = width.min(height) as f32 * scene.height;
    let (sin, cos) = scene.degrees.to_radians().sin_cos();
    let place = |(x, y): Point| {
        let (x, y) = ((x - 0.5) * side, (y - 0.5) * side);
        (
            scene.middle.0 * width as f32 + x * cos - y * sin,
            scene.middle.1 * height as f32 + x * sin + y * cos,
        )
    };
    let mut segments = Vec::new();
    for stroke in DIGITS[digit] {
        let line: Vec<Point> = curve(stroke).into_iter().map(place).collect();
        segments.extend(line.windows(2).map(|pair| (pair[0], pair[1])));
    }
    let mut random = 0x2545_f491_4f6c_dd1d_u64 ^ (digit as u64) << 32 ^ u64::from(width);
    let mut uniform = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 40) as f32 / (1u64 << 24) as f32
    };
    let radius = scene.pen * side / 2.0;
    RgbImage::from_fn(width, height, |x, y| {
        let point = (x as f32 + 0.5, y as f32 + 0.5);
        let near = segments.iter().map(|&(from, to)| distance(point, from, to));
        let cover = (radius + 0.5 - near.fold(f32::MAX, f32::min)).clamp(0.0, 1.0);
        let across = (point.0 / width as f32 + point.1 / height as f32) / 2.0;
        let light = 1.0 - scene.shade * across;
        // Twelve uniform numbers make a good bell.
        let error = scene.noise * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0);
        Rgb(std::array::from_fn(|channel| {
            let clean = scene.paper[channel] * (1.0 - cover) + scene.ink[channel] * cover;
            ((clean * light + error) * 255.0).round().clamp(0.0, 255.0) as u8
        }))
    })
}

pub(crate) fn encode(picture: RgbImage, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    DynamicImage::ImageRgb8(picture).write_to(&mut bytes, format).expect("encodes");
    bytes.into_inner()
}
