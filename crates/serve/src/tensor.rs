//! Tensors as the Open Inference Protocol writes them in JSON: a name, a shape, a datatype, and the
//! elements, flat or nested.

use serde::ser::{SerializeSeq, SerializeStruct};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::ApiError;
use crate::datatype::Datatype;
use crate::elements;

/// A tensor of a request or an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) datatype: Datatype,
    pub(crate) shape: Vec<usize>,
    pub(crate) elements: Elements,
}

/// The elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Elements {
    /// One after the other, little-endian.
    Numbers(Vec<u8>),
    Texts(Vec<String>),
}

impl Tensor {
    /// A tensor of `FP32`.
    pub(crate) fn floats(name: &str, shape: Vec<usize>, values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let elements = Elements::Numbers(bytes);
        Self { name: name.to_owned(), datatype: Datatype::Fp32, shape, elements }
    }
}

impl Serialize for Tensor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tensor = serializer.serialize_struct("tensor", 4)?;
        tensor.serialize_field("name", &self.name)?;
        tensor.serialize_field("datatype", self.datatype.as_str())?;
        tensor.serialize_field("shape", &self.shape)?;
        tensor.serialize_field("data", &Data(self))?;
        tensor.end()
    }
}

/// The elements alone; a number that is not finite is `null`.
struct Data<'tensor>(&'tensor Tensor);

impl Serialize for Data<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes = match &self.0.elements {
            Elements::Texts(texts) => return texts.serialize(serializer),
            Elements::Numbers(bytes) => bytes,
        };
        let width = self.0.datatype.width();
        let mut list = serializer.serialize_seq(Some(bytes.len() / width))?;
        for word in bytes.chunks_exact(width) {
            self.0.datatype.write(word, &mut list)?;
        }
        list.end()
    }
}

/// What a model takes or gives, in the protocol's words.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TensorSpec {
    pub(crate) name: String,
    /// Those it can be given in; the first is the one to show.
    pub(crate) datatypes: Vec<Datatype>,
    /// `None` where any length will do.
    pub(crate) shape: Vec<Option<usize>>,
}

impl TensorSpec {
    /// For people: `image`, FP32 or UINT8, shape [rows, 1, 28, 28].
    pub(crate) fn describe(&self) -> String {
        let datatypes: Vec<_> = self.datatypes.iter().map(|datatype| datatype.as_str()).collect();
        let side = |side: &Option<usize>| side.map_or("any".to_owned(), |side| side.to_string());
        let shape: Vec<_> = self.shape.iter().map(side).collect();
        format!("`{}`, {}, shape [{}]", self.name, datatypes.join(" or "), shape.join(", "))
    }
}

impl Serialize for TensorSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let side = |side: &Option<usize>| side.map_or(-1, |side| side as i64);
        let shape: Vec<i64> = self.shape.iter().map(side).collect();
        let mut spec = serializer.serialize_struct("tensor", 3)?;
        spec.serialize_field("name", &self.name)?;
        spec.serialize_field(
            "datatype",
            self.datatypes.first().map_or("", |first| first.as_str()),
        )?;
        spec.serialize_field("shape", &shape)?;
        spec.end()
    }
}

/// A tensor as a request has it. Its elements are read when it is known what they should be.
#[derive(Debug, Deserialize)]
pub(crate) struct Given<'json> {
    name: String,
    shape: Vec<usize>,
    datatype: String,
    #[serde(borrow)]
    data: &'json RawValue,
}

/// The tensors of a request in the order of `specs`. `fits` says whether a shape will do.
pub(crate) fn read(
    given: Vec<Given<'_>>,
    specs: &[TensorSpec],
    fits: impl Fn(&TensorSpec, &[usize]) -> bool,
) -> Result<Vec<Tensor>, ApiError> {
    let known: Vec<String> = specs.iter().map(TensorSpec::describe).collect();
    let hint = || match &known[..] {
        [only] => format!("the input is {only}"),
        several => format!("the inputs are {}", several.join("; ")),
    };
    let refuse = |what: String| ApiError::bad(what, hint());
    if given.len() != specs.len() {
        let (found, wanted) = (given.len(), specs.len());
        return Err(refuse(format!("there are {found} inputs, not {wanted}")));
    }
    if let Some(other) = given.iter().find(|one| specs.iter().all(|spec| spec.name != one.name)) {
        return Err(refuse(format!("there is no input `{}`", shorten(&other.name))));
    }
    let mut tensors = Vec::with_capacity(specs.len());
    for spec in specs {
        let mut named = given.iter().filter(|given| given.name == spec.name);
        let (Some(given), None) = (named.next(), named.next()) else {
            return Err(refuse(format!("the input `{}` is needed once", spec.name)));
        };
        let Given { shape, datatype, .. } = given;
        let known = spec.datatypes.iter().copied().find(|known| known.as_str() == datatype);
        let Some(datatype) = known else {
            return Err(refuse(format!("`{}` is {}", spec.name, shorten(datatype))));
        };
        if !fits(spec, shape) {
            return Err(refuse(format!("`{}` has shape {shape:?}", spec.name)));
        }
        let expected = shape.iter().try_fold(1usize, |product, &side| product.checked_mul(side));
        let (elements, found) = elements::read(datatype, given.data).map_err(|error| {
            refuse(format!("the data of `{}` cannot be read: {error}", spec.name))
        })?;
        if found == 0 || expected != Some(found) {
            let wanted = expected.map_or("too many".to_owned(), |count| count.to_string());
            return Err(refuse(format!("shape {shape:?} needs {wanted} elements, not {found}")));
        }
        let (name, shape) = (spec.name.clone(), shape.clone());
        tensors.push(Tensor { name, datatype, shape, elements });
    }
    Ok(tensors)
}

fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}
