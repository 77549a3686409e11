//! Trained models as ONNX files, for runtimes that know nothing of Skep.
//!
//! The messages are those of `onnx.proto`, as far as our models need them: a model is a graph of
//! operators with its weights, and a list of properties. An image goes in as `image`, bytes as
//! floats from 0 to 255 `[N, channels, height, width]`, since the graph normalises it itself; a
//! text as `tokens`, word numbers `[N, T]` with padding behind the end. Scores come out as `logits`
//! `[N, classes]`.

use prost::Message;
use skep_wire::Frame;

use crate::LearnError;

/// The property with the names of the classes, a JSON list.
pub const CLASSES: &str = "skep.classes";

/// The property with the kind of the model, as in a job.
pub const KIND: &str = "skep.kind";

/// The property that says how pictures were made: `ink` or `photograph`.
pub const FORM: &str = "skep.form";

/// The property with the vocabulary of a model of texts: the `vocabulary.json` of its run.
pub const VOCABULARY: &str = "skep.vocabulary";

/// The operators' version. Any runtime since 2022 has it.
const OPERATORS: i64 = 17;

/// The format's version that goes with it.
const FORMAT: i64 = 8;

const FLOAT: i32 = 1;
const INT32: i64 = 6;
const INT64: i32 = 7;

/// `ModelProto`.
#[derive(Clone, PartialEq, Message)]
pub struct Model {
    #[prost(int64, tag = "1")]
    format: i64,
    #[prost(string, tag = "2")]
    producer: String,
    #[prost(string, tag = "3")]
    producer_version: String,
    #[prost(message, optional, tag = "7")]
    graph: Option<GraphMessage>,
    #[prost(message, repeated, tag = "8")]
    operators: Vec<OperatorSet>,
    #[prost(message, repeated, tag = "14")]
    properties: Vec<Property>,
}

/// What goes into a model or comes out of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// The element type's number in `onnx.proto`: 1 is float, 7 is int64.
    pub element: i32,
    /// A number, or a name for what may differ from call to call.
    pub shape: Vec<String>,
}

impl Model {
    /// Reads a file.
    pub fn decode_file(bytes: &[u8]) -> Result<Self, prost::DecodeError> {
        Self::decode(bytes)
    }

    /// The file.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.encode_to_vec()
    }

    /// Adds a property.
    pub fn note(&mut self, key: &str, value: &str) {
        self.properties.push(Property { key: key.to_owned(), value: value.to_owned() });
    }

    /// A property.
    pub fn property(&self, key: &str) -> Option<&str> {
        let found = self.properties.iter().find(|property| property.key == key);
        found.map(|property| property.value.as_str())
    }

    /// All properties.
    pub fn properties(&self) -> impl Iterator<Item = (&str, &str)> {
        self.properties.iter().map(|property| (property.key.as_str(), property.value.as_str()))
    }

    /// What goes in; weights that are listed as inputs too are left out.
    pub fn inputs(&self) -> Vec<Port> {
        let Some(graph) = &self.graph else { return Vec::new() };
        let is_weight = |port: &Port| graph.weights.iter().any(|weight| weight.name == port.name);
        graph.inputs.iter().map(ValueInfo::port).filter(|port| !is_weight(port)).collect()
    }

    /// What comes out.
    pub fn outputs(&self) -> Vec<Port> {
        self.graph.iter().flat_map(|graph| &graph.outputs).map(ValueInfo::port).collect()
    }

    /// The operators in the order in which they run.
    pub fn operators(&self) -> impl Iterator<Item = &str> {
        self.graph.iter().flat_map(|graph| &graph.nodes).map(|node| node.operator.as_str())
    }

    /// The weights: name, shape and how many bytes.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &[i64], usize)> {
        let size = |tensor: &TensorMessage| {
            tensor.raw.len() + 4 * tensor.floats.len() + 8 * tensor.int64s.len()
        };
        let weights = self.graph.iter().flat_map(|graph| &graph.weights);
        weights.map(move |tensor| (tensor.name.as_str(), &tensor.shape[..], size(tensor)))
    }
}

#[derive(Clone, PartialEq, Message)]
struct OperatorSet {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(int64, tag = "2")]
    version: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Property {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Clone, PartialEq, Message)]
struct GraphMessage {
    #[prost(message, repeated, tag = "1")]
    nodes: Vec<Node>,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(message, repeated, tag = "5")]
    weights: Vec<TensorMessage>,
    #[prost(message, repeated, tag = "11")]
    inputs: Vec<ValueInfo>,
    #[prost(message, repeated, tag = "12")]
    outputs: Vec<ValueInfo>,
}

#[derive(Clone, PartialEq, Message)]
struct Node {
    #[prost(string, repeated, tag = "1")]
    inputs: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    outputs: Vec<String>,
    #[prost(string, tag = "3")]
    name: String,
    #[prost(string, tag = "4")]
    operator: String,
    #[prost(message, repeated, tag = "5")]
    attributes: Vec<AttributeMessage>,
}

#[derive(Clone, PartialEq, Message)]
struct AttributeMessage {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int64, optional, tag = "3")]
    int: Option<i64>,
    #[prost(bytes = "vec", optional, tag = "4")]
    text: Option<Vec<u8>>,
    #[prost(int64, repeated, tag = "8")]
    ints: Vec<i64>,
    #[prost(int32, tag = "20")]
    kind: i32,
}

#[derive(Clone, PartialEq, Message)]
struct TensorMessage {
    #[prost(int64, repeated, tag = "1")]
    shape: Vec<i64>,
    #[prost(int32, tag = "2")]
    element: i32,
    #[prost(float, repeated, tag = "4")]
    floats: Vec<f32>,
    #[prost(int64, repeated, tag = "7")]
    int64s: Vec<i64>,
    #[prost(string, tag = "8")]
    name: String,
    #[prost(bytes = "vec", tag = "9")]
    raw: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct ValueInfo {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    kind: Option<TypeMessage>,
}

#[derive(Clone, PartialEq, Message)]
struct TypeMessage {
    #[prost(message, optional, tag = "1")]
    tensor: Option<TensorType>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorType {
    #[prost(int32, tag = "1")]
    element: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<ShapeMessage>,
}

#[derive(Clone, PartialEq, Message)]
struct ShapeMessage {
    #[prost(message, repeated, tag = "1")]
    sides: Vec<Side>,
}

#[derive(Clone, PartialEq, Message)]
struct Side {
    #[prost(int64, optional, tag = "1")]
    number: Option<i64>,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
}

impl ValueInfo {
    fn new(name: &str, element: i32, shape: &[&str]) -> Self {
        let side = |side: &&str| match side.parse() {
            Ok(number) => Side { number: Some(number), name: None },
            Err(_) => Side { number: None, name: Some((*side).to_owned()) },
        };
        let shape = ShapeMessage { sides: shape.iter().map(side).collect() };
        let tensor = TensorType { element, shape: Some(shape) };
        let kind = Some(TypeMessage { tensor: Some(tensor) });
        Self { name: name.to_owned(), kind }
    }

    fn port(&self) -> Port {
        let tensor = self.kind.clone().and_then(|kind| kind.tensor).unwrap_or_default();
        let side = |side: Side| match (side.number, side.name) {
            (Some(number), _) => number.to_string(),
            (None, Some(name)) => name,
            (None, None) => "?".to_owned(),
        };
        let sides = tensor.shape.unwrap_or_default().sides;
        Port {
            name: self.name.clone(),
            element: tensor.element,
            shape: sides.into_iter().map(side).collect(),
        }
    }
}

/// A setting of an operator.
pub(crate) enum Attribute<'values> {
    Int(i64),
    Ints(&'values [i64]),
    Text(&'values str),
}

/// The name of a value in a graph.
pub(crate) type Name = String;

/// A graph in the making. Each method adds an operator and gives the name of its result.
pub(crate) struct Graph<'parameters> {
    parameters: &'parameters Frame,
    message: GraphMessage,
}

impl<'parameters> Graph<'parameters> {
    pub(crate) fn new(name: &str, parameters: &'parameters Frame) -> Self {
        Self { parameters, message: GraphMessage { name: name.to_owned(), ..Default::default() } }
    }

    pub(crate) fn float_input(&mut self, name: &str, shape: &[&str]) -> Name {
        self.message.inputs.push(ValueInfo::new(name, FLOAT, shape));
        name.to_owned()
    }

    pub(crate) fn int_input(&mut self, name: &str, shape: &[&str]) -> Name {
        self.message.inputs.push(ValueInfo::new(name, INT64, shape));
        name.to_owned()
    }

    /// One of the model's tensors.
    pub(crate) fn weight(&mut self, name: &str) -> Result<Name, LearnError> {
        let (shape, values) = self.tensor(name)?;
        Ok(self.floats(name, &shape, values))
    }

    /// The shape and the numbers of one of the model's tensors.
    pub(crate) fn tensor(
        &self,
        name: &str,
    ) -> Result<(Vec<usize>, &'parameters [f32]), LearnError> {
        let place = self.parameters.layout().place(name);
        let missing = || LearnError::Layout { what: "version", model: self.message.name.clone() };
        let values = self.parameters.floats_of(name).ok_or_else(missing)?;
        Ok((place.ok_or_else(missing)?.shape.clone(), values))
    }

    /// A tensor of floats.
    pub(crate) fn floats(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Name {
        self.message.weights.push(TensorMessage {
            shape: shape.iter().map(|&side| side as i64).collect(),
            element: FLOAT,
            name: name.to_owned(),
            raw: values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            ..Default::default()
        });
        name.to_owned()
    }

    /// A list of whole numbers, or a single one.
    pub(crate) fn ints(&mut self, name: &str, shape: &[usize], values: &[i64]) -> Name {
        self.message.weights.push(TensorMessage {
            shape: shape.iter().map(|&side| side as i64).collect(),
            element: INT64,
            name: name.to_owned(),
            raw: values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            ..Default::default()
        });
        name.to_owned()
    }

    /// An operator with one result.
    pub(crate) fn apply(
        &mut self,
        operator: &str,
        inputs: &[&str],
        attributes: &[(&str, Attribute<'_>)],
    ) -> Name {
        let result = format!("{}_{}", operator.to_ascii_lowercase(), self.message.nodes.len());
        let attribute = |(name, value): &(&str, Attribute<'_>)| {
            let mut message = AttributeMessage { name: (*name).to_owned(), ..Default::default() };
            match value {
                Attribute::Int(int) => (message.int, message.kind) = (Some(*int), 2),
                Attribute::Text(text) => {
                    (message.text, message.kind) = (Some(text.as_bytes().to_vec()), 3);
                }
                Attribute::Ints(ints) => (message.ints, message.kind) = (ints.to_vec(), 7),
            }
            message
        };
        self.message.nodes.push(Node {
            inputs: inputs.iter().map(|&input| input.to_owned()).collect(),
            outputs: vec![result.clone()],
            name: result.clone(),
            operator: operator.to_owned(),
            attributes: attributes.iter().map(attribute).collect(),
        });
        result
    }

    /// PyTorch's `Linear` by its name.
    pub(crate) fn linear(&mut self, input: &str, layer: &str) -> Result<Name, LearnError> {
        let weight = self.weight(&format!("{layer}.weight"))?;
        let bias = self.weight(&format!("{layer}.bias"))?;
        Ok(self.apply("Gemm", &[input, &weight, &bias], &[("transB", Attribute::Int(1))]))
    }

    pub(crate) fn float_of(&mut self, input: &str) -> Name {
        self.apply("Cast", &[input], &[("to", Attribute::Int(FLOAT.into()))])
    }

    pub(crate) fn int64_of(&mut self, input: &str) -> Name {
        self.apply("Cast", &[input], &[("to", Attribute::Int(INT64.into()))])
    }

    pub(crate) fn int32_of(&mut self, input: &str) -> Name {
        self.apply("Cast", &[input], &[("to", Attribute::Int(INT32))])
    }

    /// The model, whose scores are `result`.
    pub(crate) fn finish(mut self, result: &str, classes: &[String]) -> Model {
        let count = classes.len().to_string();
        self.message.outputs.push(ValueInfo::new("logits", FLOAT, &["N", &count]));
        for node in &mut self.message.nodes {
            for output in node.outputs.iter_mut().filter(|output| *output == result) {
                "logits".clone_into(output);
            }
        }
        let mut model = Model {
            format: FORMAT,
            producer: "skep".to_owned(),
            producer_version: env!("CARGO_PKG_VERSION").to_owned(),
            graph: Some(self.message),
            operators: vec![OperatorSet { domain: String::new(), version: OPERATORS }],
            properties: Vec::new(),
        };
        let classes = serde_json::to_string(classes).unwrap_or_default();
        model.note(CLASSES, &classes);
        model
    }
}
