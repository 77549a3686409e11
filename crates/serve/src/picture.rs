//! What a server says of a picture that `skep_data::picture` cannot use.

use skep_data::picture::{self, MOST_PIXELS, PictureError};
use skep_learn::ImageForm;

use crate::ApiError;

/// Decodes a PNG or JPEG file and brings it to a model's form: channels, height, width; bytes.
pub fn to_bytes(file: &[u8], shape: [usize; 3], form: ImageForm) -> Result<Vec<u8>, ApiError> {
    picture::to_bytes(file, shape, form).map_err(|error| match error {
        PictureError::TooLarge { .. } => ApiError::too_large(
            error.to_string(),
            format!("at most {MOST_PIXELS} are taken; make it smaller"),
        ),
        PictureError::Nothing => ApiError::bad(
            error.to_string(),
            "send one with a figure that is clearly darker or lighter than its ground",
        ),
        PictureError::Unreadable(what) => ApiError::bad(what, "send a PNG or JPEG file"),
        other => ApiError::internal(&other),
    })
}
