//! From the bytes of a picture file to the bytes that a model takes: the same way for a picture
//! that a model learns from and for one that it is asked about.

use std::io::Cursor;

use image::imageops::{self, FilterType};
use image::metadata::Orientation;
use image::{DynamicImage, GrayImage, ImageDecoder, ImageFormat, ImageReader, Limits, RgbImage};
use thiserror::Error;

use crate::ink;

/// A picture may have so many pixels.
pub const MOST_PIXELS: u64 = 40_000_000;

/// Decoding one may take so many bytes.
const MOST_MEMORY: u64 = 256 << 20;

/// How a model's pictures were made, so that others can be made the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageForm {
    /// One figure in light ink on black, fitted into the middle and centred by its mass: MNIST's.
    Ink,
    /// The whole picture, resized.
    Photograph,
}

/// Why a picture cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PictureError {
    /// Not a picture, or a broken one.
    #[error("{0}")]
    Unreadable(String),
    /// More pixels than are taken.
    #[error("the picture has {width} x {height} pixels")]
    TooLarge {
        /// Pixels across.
        width: u32,
        /// Pixels down.
        height: u32,
    },
    /// A figure is wanted, and there is none.
    #[error("there is nothing on the picture")]
    Nothing,
    /// Pictures have one channel or three.
    #[error("a model that takes {0} channels")]
    Channels(usize),
}

/// Decodes a PNG or JPEG file and brings it to a model's form: channels, height, width; bytes.
pub fn to_bytes(file: &[u8], shape: [usize; 3], form: ImageForm) -> Result<Vec<u8>, PictureError> {
    to_form(&decode(file)?, shape, form)
}

/// As [`to_bytes`], for pictures to learn from: one that has the model's size already is taken as it
/// is.
pub fn to_sample(file: &[u8], shape: [usize; 3], form: ImageForm) -> Result<Vec<u8>, PictureError> {
    let picture = decode(file)?;
    let [_, height, width] = shape;
    let fits = (picture.height() as usize, picture.width() as usize) == (height, width);
    to_form(&picture, shape, if fits { ImageForm::Photograph } else { form })
}

/// Brings grey pixels to a model's form, as [`to_sample`] does.
pub fn grey_to_sample(
    pixels: Vec<u8>,
    [across, down]: [usize; 2],
    shape: [usize; 3],
    form: ImageForm,
) -> Result<Vec<u8>, PictureError> {
    let size = u32::try_from(across).ok().zip(u32::try_from(down).ok());
    let picture = size.and_then(|(across, down)| GrayImage::from_raw(across, down, pixels));
    let picture = picture.ok_or_else(|| {
        PictureError::Unreadable(format!("its pixels are not {across} times {down}"))
    })?;
    let fits = shape == [1, down, across];
    let form = if fits { ImageForm::Photograph } else { form };
    to_form(&DynamicImage::ImageLuma8(picture), shape, form)
}

fn to_form(
    picture: &DynamicImage,
    [channels, height, width]: [usize; 3],
    form: ImageForm,
) -> Result<Vec<u8>, PictureError> {
    match (form, channels) {
        (ImageForm::Ink, 1) => {
            ink::fit(&picture.to_luma8(), height, width).ok_or(PictureError::Nothing)
        }
        (_, 1) => Ok(resize(picture, height, width).to_luma8().into_raw()),
        (_, 3) => {
            let rgb: RgbImage = resize(picture, height, width).to_rgb8();
            let plane = |channel: usize| rgb.pixels().map(move |pixel| pixel.0[channel]);
            Ok((0..3).flat_map(plane).collect())
        }
        _ => Err(PictureError::Channels(channels)),
    }
}

fn resize(picture: &DynamicImage, height: usize, width: usize) -> DynamicImage {
    picture.resize_exact(width as u32, height as u32, FilterType::Triangle)
}

/// The size is known and checked before memory is taken for it.
fn decode(file: &[u8]) -> Result<DynamicImage, PictureError> {
    let refuse = PictureError::Unreadable;
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
        return Err(PictureError::TooLarge { width, height });
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
