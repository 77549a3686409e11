//! The run's tensors: names, shapes and roles.

use std::collections::BTreeMap;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::WireError;

/// How the values that workers bring home for a buffer become the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BufferMerge {
    /// Weighted by samples: running means and variances.
    Mean,
    /// The largest: counters.
    Max,
    /// The one with the highest place in the round.
    Last,
}

/// What a tensor is for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase", tag = "role", deny_unknown_fields)]
pub enum Role {
    /// Moved by the optimiser, with the settings of a parameter group.
    Trainable {
        /// The group; `default` unless said otherwise.
        #[serde(default = "default_group")]
        group: String,
    },
    /// Brought home by workers as a value, such as BatchNorm's statistics.
    Buffer {
        /// How values merge.
        merge: BufferMerge,
    },
    /// Follows a trainable tensor at a distance, such as a target network.
    Ema {
        /// The tensor it follows.
        of: String,
        /// How much of the distance it covers with each version.
        tau: f32,
    },
    /// Never changes.
    Frozen,
}

fn default_group() -> String {
    "default".to_owned()
}

impl Role {
    /// A trainable tensor of the default group.
    pub fn trainable() -> Self {
        Self::Trainable { group: default_group() }
    }
}

/// One tensor of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TensorSpec {
    /// PyTorch's name for it, `conv1.weight`.
    pub name: String,
    /// safetensors' name for the element type, `F32`.
    #[schema(value_type = String)]
    pub dtype: Dtype,
    /// PyTorch's shape, `[out, in, height, width]`.
    pub shape: Vec<usize>,
    /// What it is for.
    #[serde(flatten)]
    pub role: Role,
}

impl TensorSpec {
    /// How many elements it has, if that fits into memory at all.
    pub fn elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |product, &side| product.checked_mul(side))
    }
}

/// All tensors of a run in canonical order (safetensors' own: by element type, then name).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "Vec<TensorSpec>", into = "Vec<TensorSpec>")]
#[schema(value_type = Vec<TensorSpec>)]
pub struct Schema(Vec<TensorSpec>);

impl Schema {
    /// Orders and checks. Trainable and ema tensors are `F32`; an ema follows a trainable tensor
    /// of its own shape; names are unique.
    pub fn new(mut tensors: Vec<TensorSpec>) -> Result<Self, WireError> {
        tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
        let mut by_name = BTreeMap::new();
        for tensor in &tensors {
            if tensor.name.is_empty() || tensor.name.len() > 512 || tensor.name == "__metadata__" {
                return Err(WireError::Schema(format!("`{}` cannot be a name", tensor.name)));
            }
            if tensor.elements().is_none() {
                return Err(WireError::Schema(format!("`{}` is too large", tensor.name)));
            }
            if by_name.insert(tensor.name.as_str(), tensor).is_some() {
                return Err(WireError::Schema(format!("`{}` is there twice", tensor.name)));
            }
        }
        for tensor in &tensors {
            let wants_f32 = match &tensor.role {
                Role::Trainable { .. } => true,
                Role::Ema { of, tau } => {
                    let followed = by_name.get(of.as_str()).ok_or_else(|| {
                        WireError::Schema(format!("`{}` follows `{of}`, not there", tensor.name))
                    })?;
                    let trainable = matches!(followed.role, Role::Trainable { .. });
                    if !trainable || followed.shape != tensor.shape {
                        return Err(WireError::Schema(format!(
                            "`{}` follows `{of}`, which is not trainable or has another shape",
                            tensor.name
                        )));
                    }
                    if !(0.0..=1.0).contains(tau) {
                        return Err(WireError::Schema(format!(
                            "`{}` has tau {tau}; it must be from 0 to 1",
                            tensor.name
                        )));
                    }
                    true
                }
                Role::Buffer { merge: BufferMerge::Mean } => true,
                Role::Buffer { merge: BufferMerge::Max } => {
                    !matches!(tensor.dtype, Dtype::I64 | Dtype::F32)
                }
                Role::Buffer { .. } | Role::Frozen => false,
            };
            if wants_f32 && tensor.dtype != Dtype::F32 {
                return Err(WireError::Schema(format!(
                    "`{}` is {:?}; its role needs F32 (or I64 for a maximum)",
                    tensor.name, tensor.dtype
                )));
            }
        }
        if !tensors.iter().any(|tensor| matches!(tensor.role, Role::Trainable { .. })) {
            return Err(WireError::Schema("no tensor is trainable".to_owned()));
        }
        Ok(Self(tensors))
    }

    /// The tensors in canonical order.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.0
    }

    /// One tensor.
    pub fn get(&self, name: &str) -> Option<&TensorSpec> {
        self.0.iter().find(|tensor| tensor.name == name)
    }

    /// How many elements the optimiser moves.
    pub fn trainable_elements(&self) -> usize {
        self.0
            .iter()
            .filter(|tensor| matches!(tensor.role, Role::Trainable { .. }))
            .filter_map(TensorSpec::elements)
            .sum()
    }
}

impl TryFrom<Vec<TensorSpec>> for Schema {
    type Error = WireError;

    fn try_from(tensors: Vec<TensorSpec>) -> Result<Self, WireError> {
        Self::new(tensors)
    }
}

impl From<Schema> for Vec<TensorSpec> {
    fn from(schema: Schema) -> Self {
        schema.0
    }
}
