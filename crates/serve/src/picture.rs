//! From the bytes of a picture file to the bytes that a model takes.

use std::io::Cursor;

use image::imageops::{self, FilterType};
use image::metadata::Orientation;
use image::{DynamicImage, GrayImage, ImageDecoder, ImageFormat, ImageReader, Limits, RgbImage};
use skep_learn::ImageForm;

use crate::{ApiError, ink};

/// A picture may have so many pixels.
pub const MOST_PIXELS: u64 = 40_000_000;

/// Decoding one may take so many bytes.
const MOST_MEMORY: u64 = 256 << 20;

/// Decodes a PNG or JPEG file and brings it to a model's form: channels, height, width; bytes.
pub fn to_bytes(file: &[u8], shape: [usize; 3], form: ImageForm) -> Result<Vec<u8>, ApiError> {
    let picture = decode(file)?;
    let [channels, height, width] = shape;
    match (form, channels) {
        (ImageForm::Ink, 1) => {
            let grey = picture.to_luma8();
            ink::fit(&grey, height, width).ok_or_else(|| {
                ApiError::bad(
                    "there is nothing on the picture",
                    "send one with a figure that is clearly darker or lighter than its ground",
                )
            })
        }
        (_, 1) => Ok(resize(&picture, height, width).to_luma8().into_raw()),
        (_, 3) => {
            let rgb: RgbImage = resize(&picture, height, width).to_rgb8();
            let plane = |channel: usize| rgb.pixels().map(move |pixel| pixel.0[channel]);
            Ok((0..3).flat_map(plane).collect())
        }
        _ => Err(ApiError::internal(&format!("a model that takes {channels} channels"))),
    }
}

fn resize(picture: &DynamicImage, height: usize, width: usize) -> DynamicImage {
    picture.resize_exact(width as u32, height as u32, FilterType::Triangle)
}

/// The size is known and checked before memory is taken for it.
fn decode(file: &[u8]) -> Result<DynamicImage, ApiError> {
    let hint = "send a PNG or JPEG file";
    let refuse = |what: String| ApiError::bad(what, hint);
    let mut reader = ImageReader::new(Cursor::new(file))
        .with_guessed_format()
        .map_err(|error| refuse(error.to_string()))?;
    if !matches!(reader.format(), Some(ImageFormat::Png | ImageFormat::Jpeg)) {
        return Err(refuse("this is not a picture that can be read here".to_owned()));
    }
    let mut limits = Limits::default();
    limits.max_alloc = Some(MOST_MEMORY);
    reader.limits(limits);
    let broken = |error: image::ImageError| refuse(format!("the picture cannot be read: {error}"));
    let mut decoder = reader.into_decoder().map_err(broken)?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > MOST_PIXELS || decoder.total_bytes() > MOST_MEMORY {
        return Err(ApiError::too_large(
            format!("the picture has {width} x {height} pixels"),
            format!("at most {MOST_PIXELS} are taken; make it smaller"),
        ));
    }
    if width == 0 || height == 0 {
        return Err(refuse("the picture is empty".to_owned()));
    }
    // Telephones write down how they were held.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut picture = DynamicImage::from_decoder(decoder).map_err(broken)?;
    picture.apply_orientation(orientation);
    Ok(onto_ground(picture))
}

/// Puts a picture that can be seen through on white, or on black if what is on it is light.
fn onto_ground(picture: DynamicImage) -> DynamicImage {
    if !picture.color().has_alpha() {
        return picture;
    }
    let rgba = picture.to_rgba8();
    let light = |pixel: &image::Rgba<u8>| {
        let [red, green, blue, _] = pixel.0.map(u64::from);
        (299 * red + 587 * green + 114 * blue) / 1000
    };
    let (sum, weight) = rgba.pixels().fold((0, 0), |(sum, weight), pixel| {
        let alpha = u64::from(pixel.0[3]);
        (sum + alpha * light(pixel), weight + alpha)
    });
    let covered = weight / 255 >= u64::from(rgba.width()) * u64::from(rgba.height());
    let ground = if !covered && sum > 128 * weight { 0u8 } else { 255 };
    let mut opaque = RgbImage::new(rgba.width(), rgba.height());
    for (from, to) in rgba.pixels().zip(opaque.pixels_mut()) {
        let alpha = u32::from(from.0[3]);
        let blend = |value: u8| {
            ((u32::from(value) * alpha + u32::from(ground) * (255 - alpha)) / 255) as u8
        };
        to.0 = [blend(from.0[0]), blend(from.0[1]), blend(from.0[2])];
    }
    DynamicImage::ImageRgb8(opaque)
}

/// At most `most` pixels a side, by averaging.
pub(crate) fn shrink(picture: &GrayImage, most: u32) -> GrayImage {
    let (width, height) = picture.dimensions();
    let longest = width.max(height);
    if longest <= most {
        return picture.clone();
    }
    let side = |side: u32| (u64::from(side) * u64::from(most) / u64::from(longest)).max(1) as u32;
    imageops::thumbnail(picture, side(width), side(height))
}
