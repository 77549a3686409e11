//! The forms that a model file can have: told apart by their first bytes when they are read, by
//! their names when they are written.

use std::fmt;
use std::path::Path;

/// The form of a model file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelFormat {
    /// `.safetensors`
    Safetensors,
    /// `.npz`: a zip of numpy's arrays.
    Npz,
    /// `.pt`, `.pth`: what `torch.save` makes.
    Torch,
    /// `.h5`, `.hdf5`, `.keras.h5`, `.weights.h5`: HDF5, with or without Keras' attributes.
    Hdf5,
    /// `.keras`: a zip with Keras' description and a `.weights.h5`.
    Keras,
}

/// The endings of names.
const ENDINGS: [(&str, ModelFormat); 7] = [
    ("safetensors", ModelFormat::Safetensors),
    ("npz", ModelFormat::Npz),
    ("pt", ModelFormat::Torch),
    ("pth", ModelFormat::Torch),
    ("h5", ModelFormat::Hdf5),
    ("hdf5", ModelFormat::Hdf5),
    ("keras", ModelFormat::Keras),
];

impl ModelFormat {
    /// The endings that files can have, for people.
    pub const KNOWN: &str = ".safetensors, .npz, .pt, .pth, .h5, .hdf5 and .keras";

    /// By how a name ends.
    pub fn of_name(path: &Path) -> Option<Self> {
        let ending = path.extension()?.to_str()?.to_ascii_lowercase();
        ENDINGS.iter().find(|(known, _)| *known == ending).map(|(_, format)| *format)
    }
}

impl fmt::Display for ModelFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Safetensors => "safetensors",
            Self::Npz => "npz",
            Self::Torch => "PyTorch",
            Self::Hdf5 => "HDF5",
            Self::Keras => "Keras",
        })
    }
}
