//! From a decoded pickle to tensors: finds the state dict, checks every offset and stride against
//! the storages' real lengths, and copies the numbers out.

use std::collections::BTreeMap;

use crate::pickle::{Node, Pickle, TensorRecipe, Value};
use crate::{DataError, LoadedTensor};

/// The names under which training scripts keep the state dict beside other things.
const NESTED: [&str; 3] = ["state_dict", "model_state_dict", "model"];

/// Reads the tensors of a pickled state dict. `storage` finds the bytes of a storage by its name;
/// `limit` is how many bytes of tensors may be made in all, since strides can make one number
/// many. Non-contiguous tensors become contiguous. A state dict that lies under `state_dict`,
/// `model_state_dict` or `model` is found there.
pub fn read_state_dict<'bytes>(
    pickle: &[u8],
    mut storage: impl FnMut(&str) -> Option<&'bytes [u8]>,
    limit: usize,
) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
    let pickle = Pickle::decode(pickle)?;
    let mut left = limit;
    let mut loaded = BTreeMap::new();
    for (name, recipe) in tensors(&pickle)? {
        let refuse = |reason: String| DataError::file(name, reason);
        let key = pickle.text(recipe.key).unwrap_or_default();
        let bytes =
            storage(key).ok_or_else(|| refuse(format!("its storage `{key}` is missing")))?;
        let view = View::check(&pickle, recipe, bytes).map_err(refuse)?;
        // Names and shapes count too, and one that is there twice counts twice (the later wins, as
        // in Python): a few bytes of pickle must not become a memory full of tensors.
        let cost = view.length.saturating_add(name.len() + 16 * view.shape.len());
        left = left.checked_sub(cost).ok_or_else(|| {
            refuse(format!("with it, the tensors take more than the {limit} bytes allowed"))
        })?;
        loaded.insert(name.to_owned(), view.copy());
    }
    Ok(loaded)
}

/// The names and recipes of the state dict, wherever it is.
fn tensors(pickle: &Pickle) -> Result<Vec<(&str, &TensorRecipe)>, DataError> {
    let refuse = |reason: String| DataError::Pickle { at: 0, reason };
    let dict_of = |node: Node| match pickle.value(node) {
        Value::Dict(items) => Some(items),
        _ => None,
    };
    let mut items = dict_of(pickle.root())
        .ok_or_else(|| refuse("it holds no dict; save model.state_dict()".to_owned()))?;
    // Values may be cyclic: a few levels are enough for everyone.
    for _ in 0..3 {
        if items.iter().any(|(_, value)| matches!(pickle.value(*value), Value::Tensor(_))) {
            break;
        }
        let nested = NESTED.iter().find_map(|name| {
            let (_, value) = items.iter().find(|(key, _)| pickle.text(*key) == Some(name))?;
            dict_of(*value)
        });
        items = nested.ok_or_else(|| {
            refuse(format!("no dict of tensors at its top or under one of {NESTED:?}"))
        })?;
    }
    let mut found = Vec::with_capacity(items.len());
    let mut others = Vec::new();
    for (key, value) in items {
        let name = pickle.text(*key).ok_or_else(|| refuse("a tensor's name is no text".into()))?;
        match pickle.value(*value) {
            Value::Tensor(recipe) => found.push((name, recipe)),
            _ => others.push(format!("`{}`", name.chars().take(80).collect::<String>())),
        }
    }
    if !others.is_empty() {
        others.truncate(10);
        return Err(refuse(format!("these are no tensors: {}", others.join(", "))));
    }
    Ok(found)
}

/// A tensor that was found to lie within its storage.
struct View<'bytes> {
    recipe: &'bytes TensorRecipe,
    storage: &'bytes [u8],
    shape: Vec<u64>,
    strides: Vec<u64>,
    /// How many bytes it has once it is contiguous.
    length: usize,
}

impl<'bytes> View<'bytes> {
    fn check(
        pickle: &Pickle,
        recipe: &'bytes TensorRecipe,
        storage: &'bytes [u8],
    ) -> Result<Self, String> {
        let available = storage.len() as u64;
        if recipe.storage_bytes != available {
            return Err(format!(
                "its storage should have {} bytes, {available} are there",
                recipe.storage_bytes
            ));
        }
        let shape = pickle.numbers(recipe.shape)?;
        let mut strides = pickle.numbers(recipe.strides)?;
        if shape.len() != strides.len() {
            return Err("it has not as many strides as dimensions".to_owned());
        }
        let width = recipe.dtype.bitsize() as u64 / 8;
        let overflow = || format!("shape {shape:?} with strides {strides:?} is too large");
        let mut last = recipe.offset;
        let mut elements = 1u64;
        for (&side, &stride) in shape.iter().zip(&strides) {
            elements = elements.checked_mul(side).ok_or_else(overflow)?;
            let reach = side.saturating_sub(1).checked_mul(stride).ok_or_else(overflow)?;
            last = last.checked_add(reach).ok_or_else(overflow)?;
        }
        if elements > 0 && last >= available / width {
            return Err(format!(
                "shape {shape:?} with strides {strides:?} from {} leaves its storage of {} elements",
                recipe.offset,
                available / width
            ));
        }
        let length = elements.checked_mul(width).and_then(|bytes| usize::try_from(bytes).ok());
        let length = length.ok_or_else(overflow)?;
        // The stride of a dimension of one is never walked and may be anything.
        for (stride, _) in strides.iter_mut().zip(&shape).filter(|(_, side)| **side == 1) {
            *stride = 0;
        }
        Ok(Self { recipe, storage, shape, strides, length })
    }

    /// Whether the elements lie one after the other. Of a tensor that is not empty.
    fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&side, &stride)| {
            let fits = side == 1 || stride == expected;
            expected *= side;
            fits
        })
    }

    /// Copies in one piece where it lies so; element by element, the last dimension fastest, where
    /// it does not.
    fn copy(&self) -> LoadedTensor {
        let width = self.recipe.dtype.bitsize() / 8;
        let mut bytes = Vec::with_capacity(self.length);
        if self.length == 0 {
            // An empty tensor may claim any offset.
        } else if self.is_contiguous() {
            let start = self.recipe.offset as usize * width;
            bytes.extend_from_slice(&self.storage[start..start + self.length]);
        } else {
            let mut index = vec![0u64; self.shape.len()];
            let mut at = self.recipe.offset;
            while bytes.len() < self.length {
                let start = at as usize * width;
                bytes.extend_from_slice(&self.storage[start..start + width]);
                for axis in (0..index.len()).rev() {
                    index[axis] += 1;
                    at += self.strides[axis];
                    if index[axis] < self.shape[axis] {
                        break;
                    }
                    at -= self.strides[axis] * self.shape[axis];
                    index[axis] = 0;
                }
            }
        }
        let shape = self.shape.iter().map(|&side| side as usize).collect();
        LoadedTensor { dtype: self.recipe.dtype, shape, bytes }
    }
}
