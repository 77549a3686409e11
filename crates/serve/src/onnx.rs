//! Models of any make, as ONNX files: what they take and give is read from the graph, and tract runs
//! them. A graph that takes one picture and gives one score per class can be asked by people too.

mod plans;
mod settings;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::catch_unwind;
use std::path::Path;

use skep_learn::{ImageForm, Inference, Input};
use tract_onnx::pb::{GraphProto, tensor_shape_proto::dimension, type_proto};
use tract_onnx::prelude::*;
use tract_onnx::tract_hir::infer::Factoid;

use crate::tensor::{Tensor, TensorSpec};
use crate::thread::softmax;
use crate::{ApiError, ServeError};
use plans::Plans;
pub use settings::GraphSettings;

/// What tract says can go on for pages.
const LONGEST_REASON: usize = 400;

/// A graph that can be asked.
pub(crate) struct Graph {
    inputs: Vec<TensorSpec>,
    outputs: Vec<TensorSpec>,
    plans: Plans,
    picture: Option<Picture>,
}

/// How a graph is asked about a picture.
struct Picture {
    inference: Inference,
    /// The input's shape, with one row.
    shape: Vec<usize>,
    layout: PixelLayout,
    /// For every channel: what its values are multiplied with, and what is added then.
    normalise: Vec<(f32, f32)>,
    /// The output with the scores.
    output: usize,
    /// Whether the graph makes probabilities of its scores itself.
    has_softmax: bool,
}

/// Whether channels lie before or behind height and width.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PixelLayout {
    ChannelsFirst,
    ChannelsLast,
}

impl Graph {
    /// Reads an ONNX file, and plans it once, so that what cannot be run is known at the start.
    pub(crate) fn open(
        path: &Path,
        bytes: &[u8],
        settings: &GraphSettings,
    ) -> Result<Self, ServeError> {
        // A decoder that trips over a broken file must not look like a fault of this program.
        catch_unwind(|| Self::try_open(path, bytes, settings))
            .unwrap_or_else(|_| Err(refuse(path, "it is damaged")))
    }

    fn try_open(path: &Path, bytes: &[u8], settings: &GraphSettings) -> Result<Self, ServeError> {
        let framework = tract_onnx::onnx().with_ignore_value_info(true);
        let file = framework.proto_model_for_read(&mut &bytes[..]);
        let file = file.map_err(|error| refuse(path, &reason(&error)))?;
        let Some(proto) = &file.graph else { return Err(refuse(path, "there is no graph in it")) };
        let mut unknown = BTreeSet::new();
        operators(proto, &mut |name| {
            if !framework.op_register.0.contains_key(name) {
                unknown.insert(name.to_owned());
            }
        });
        if !unknown.is_empty() {
            let names: Vec<_> = unknown.into_iter().collect();
            return Err(ServeError::model(
                format!(
                    "{} uses operators that are not known here: {}",
                    path.display(),
                    names.join(", ")
                ),
                "export the model with other operators, or serve it with onnxruntime",
            ));
        }
        let folder = path.parent().and_then(Path::to_str);
        let parsed = framework.parse(&file, folder);
        let parsed = parsed.map_err(|error| refuse(path, &reason(&error)))?;
        if let [missing, ..] = &parsed.unresolved_inputs[..] {
            return Err(refuse(path, &format!("nothing in it gives `{missing}`")));
        }
        let (specs, types) = inputs_of(&parsed.model).map_err(|why| refuse(path, &why))?;
        let shapes = specs.iter().map(|spec| spec.shape.clone());
        let inputs: Vec<_> = types.into_iter().zip(shapes).collect();
        let plans = Plans::new(parsed.model, &inputs).map_err(|error| {
            ServeError::model(
                format!("{} cannot be run here: {}", path.display(), reason(&error)),
                "export the model with other operators or with fixed shapes, or serve it with \
                 onnxruntime",
            )
        })?;
        let outputs = outputs_of(proto, &plans.smallest).map_err(|why| refuse(path, &why))?;
        let metadata = file.metadata_props.iter();
        let metadata: BTreeMap<_, _> =
            metadata.map(|entry| (entry.key.clone(), entry.value.clone())).collect();
        let known = settings.clone().or_metadata(&metadata)?;
        let picture = picture_of(&specs, &outputs, &plans, proto, &known)?;
        if let (None, Some(flag)) = (&picture, settings.given()) {
            return Err(ServeError::model(
                format!("{flag} is for graphs that take one picture and score classes"),
                format!("{} takes {}", path.display(), described(&specs)),
            ));
        }
        Ok(Self { inputs: specs, outputs, plans, picture })
    }

    pub(crate) fn inputs(&self) -> &[TensorSpec] {
        &self.inputs
    }

    pub(crate) fn outputs(&self) -> &[TensorSpec] {
        &self.outputs
    }

    /// What people can ask it.
    pub(crate) fn inference(&self) -> Option<Inference> {
        self.picture.as_ref().map(|picture| picture.inference.clone())
    }

    /// Answers tensors, in the order of the inputs, with tensors.
    pub(crate) fn run(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>, ApiError> {
        let values: TractResult<TVec<TValue>> = inputs.iter().map(values::value).collect();
        let run = values.and_then(|values| self.plans.run(values)).map_err(|error| {
            ApiError::bad(
                format!("the model cannot be run on this: {}", reason(&error)),
                format!("it takes {}", described(&self.inputs)),
            )
        })?;
        let named = self.outputs.iter().zip(&run);
        let tensors: TractResult<Vec<Tensor>> =
            named.map(|(spec, value)| values::tensor(&spec.name, value)).collect();
        tensors.map_err(|error| ApiError::internal(&reason(&error)))
    }

    /// The probabilities of the classes for the bytes of one picture.
    pub(crate) fn shares(&self, pixels: &[u8]) -> Result<Vec<f32>, ApiError> {
        let fail = |error: TractError| ApiError::internal(&reason(&error));
        let picture = self.picture.as_ref();
        let picture =
            picture.ok_or_else(|| ApiError::internal(&"a picture for a graph of tensors"))?;
        let input = Value::from_shape(&picture.shape, &picture.values(pixels)).map_err(fail)?;
        let outputs = self.plans.run(tvec!(input.into())).map_err(fail)?;
        let scores = outputs[picture.output].cast_to::<f32>().map_err(fail)?;
        let scores = scores.to_plain_array_view::<f32>().map_err(fail)?;
        let scores: Vec<f32> = scores.iter().copied().collect();
        Ok(if picture.has_softmax { scores } else { softmax(&scores) })
    }
}

type Value = tract_onnx::prelude::Tensor;

impl Picture {
    /// The numbers that the graph takes, from bytes channel by channel.
    fn values(&self, pixels: &[u8]) -> Vec<f32> {
        let channels = self.normalise.len();
        let plane = (pixels.len() / channels.max(1)).max(1);
        let planes = pixels.chunks_exact(plane).zip(&self.normalise);
        match self.layout {
            PixelLayout::ChannelsFirst => {
                let values = |(plane, (factor, term)): (&[u8], &(f32, f32))| -> Vec<f32> {
                    plane.iter().map(|byte| f32::from(*byte) * factor + term).collect()
                };
                planes.flat_map(values).collect()
            }
            PixelLayout::ChannelsLast => {
                let mut values = vec![0.0; pixels.len()];
                for (channel, (plane, (factor, term))) in planes.enumerate() {
                    for (at, byte) in plane.iter().enumerate() {
                        values[at * channels + channel] = f32::from(*byte) * factor + term;
                    }
                }
                values
            }
        }
    }
}

/// Names every operator of a graph and of the graphs within it.
fn operators(graph: &GraphProto, name: &mut impl FnMut(&str)) {
    for node in &graph.node {
        name(&node.op_type);
        for attribute in &node.attribute {
            for inner in attribute.g.iter().chain(&attribute.graphs) {
                operators(inner, name);
            }
        }
    }
}

fn inputs_of(model: &InferenceModel) -> Result<(Vec<TensorSpec>, Vec<DatumType>), String> {
    let (mut specs, mut types) = (Vec::new(), Vec::new());
    for outlet in &model.inputs {
        let node = &model.nodes[outlet.node];
        let fact = &node.outputs[outlet.slot].fact;
        let name = node.name.clone();
        let datum = fact.datum_type.concretize();
        let Some((datum, datatype)) =
            datum.and_then(|datum| Some((datum, values::datatype(datum)?)))
        else {
            return Err(format!("its input `{name}` is neither numbers nor truth values"));
        };
        if fact.shape.is_open() {
            return Err(format!("its input `{name}` has no shape"));
        }
        let side = |dim: TDim| length(&dim);
        let shape = fact.shape.dims().map(|dim| dim.concretize().and_then(side)).collect();
        specs.push(TensorSpec { name, datatypes: vec![datatype], shape });
        types.push(datum);
    }
    Ok((specs, types))
}

fn length(side: &TDim) -> Option<usize> {
    side.to_i64().ok().and_then(|side| usize::try_from(side).ok())
}

/// Names and free lengths as the file has them, the rest as the plan has it.
fn outputs_of(proto: &GraphProto, plan: &plans::Plan) -> Result<Vec<TensorSpec>, String> {
    let mut specs = Vec::new();
    for (at, output) in proto.output.iter().enumerate() {
        let fact = plan.model().output_fact(at).map_err(|error| reason(&error))?;
        let datatype = values::datatype(fact.datum_type)
            .ok_or_else(|| format!("its output `{}` is not of numbers", output.name))?;
        let declared = output.r#type.as_ref().and_then(|kind| kind.value.as_ref());
        let declared =
            declared.and_then(|type_proto::Value::TensorType(tensor)| tensor.shape.as_ref());
        let sides = fact.shape.dims().iter().enumerate().map(|(at, side)| {
            let free = declared
                .and_then(|shape| shape.dim.get(at))
                .is_some_and(|dim| !matches!(dim.value, Some(dimension::Value::DimValue(_))));
            if free { None } else { length(side) }
        });
        let (name, datatypes, shape) = (output.name.clone(), vec![datatype], sides.collect());
        specs.push(TensorSpec { name, datatypes, shape });
    }
    Ok(specs)
}

/// Whether a graph takes one picture and scores classes, and how it is to be asked then.
fn picture_of(
    inputs: &[TensorSpec],
    outputs: &[TensorSpec],
    plans: &Plans,
    proto: &GraphProto,
    settings: &GraphSettings,
) -> Result<Option<Picture>, ServeError> {
    let [input] = inputs else { return Ok(None) };
    let float = |spec: &TensorSpec| spec.datatypes == [crate::datatype::Datatype::Fp32];
    let (&[None | Some(1), a, b, c], true) = (&input.shape[..], float(input)) else {
        return Ok(None);
    };
    let (Some(a), Some(b), Some(c)) = (a, b, c) else { return Ok(None) };
    let (layout, [channels, height, width]) = match (a, c) {
        (1 | 3, _) => (PixelLayout::ChannelsFirst, [a, b, c]),
        (_, 1 | 3) => (PixelLayout::ChannelsLast, [c, a, b]),
        _ => return Ok(None),
    };
    // Scores are a row of numbers for one picture; the output `logits` is preferred.
    let count = |at: usize| -> Option<usize> {
        let shape = plans.smallest.model().output_fact(at).ok()?.shape.as_concrete()?;
        let longest = shape.iter().copied().max().unwrap_or(1);
        (shape.iter().product::<usize>() == longest && longest > 1).then_some(longest)
    };
    let mut rows = (0..outputs.len()).filter(|&at| float(&outputs[at]) && count(at).is_some());
    let named = rows.clone().find(|&at| outputs[at].name == "logits");
    let Some(output) = named.or_else(|| rows.next()) else { return Ok(None) };
    let scores = count(output).unwrap_or_default();
    let classes = match &settings.classes {
        None => (0..scores).map(|class| class.to_string()).collect(),
        Some(classes) => classes.clone(),
    };
    if classes.len() != scores || classes.iter().collect::<BTreeSet<_>>().len() != scores {
        return Err(ServeError::model(
            format!("there are {} names of classes for {scores} scores", classes.len()),
            format!("name {scores} classes, all differently"),
        ));
    }
    let per_channel = |values: &Option<Vec<f32>>, usual: f32, what: &str| match values.as_deref() {
        None => Ok(vec![usual; channels]),
        Some([one]) => Ok(vec![*one; channels]),
        Some(several) if several.len() == channels => Ok(several.to_vec()),
        Some(several) => Err(ServeError::model(
            format!("{what} has {} numbers, and a picture {channels} channels", several.len()),
            "give one number, or one for each channel",
        )),
    };
    let mean = per_channel(&settings.mean, 0.0, "the mean")?;
    let deviation = per_channel(&settings.deviation, 1.0, "the standard deviation")?;
    let scale = settings.scale.unwrap_or(255.0);
    if scale == 0.0 || deviation.contains(&0.0) {
        return Err(ServeError::model("a scale or standard deviation is 0", "give another number"));
    }
    let normalise = mean.iter().zip(&deviation);
    let usual = match [channels, height, width] {
        [1, 28, 28] => ImageForm::Ink,
        _ => ImageForm::Photograph,
    };
    let input = Input::Image {
        column: input.name.clone(),
        shape: [channels, height, width],
        form: settings.form.unwrap_or(usual),
    };
    let made_by = proto.node.iter().find(|node| node.output.contains(&outputs[output].name));
    Ok(Some(Picture {
        inference: Inference { input, classes },
        shape: vec![1, a, b, c],
        layout,
        normalise: normalise.map(|(mean, std)| (1.0 / (scale * std), -mean / std)).collect(),
        output,
        has_softmax: made_by.is_some_and(|node| node.op_type == "Softmax"),
    }))
}

fn described(specs: &[TensorSpec]) -> String {
    specs.iter().map(TensorSpec::describe).collect::<Vec<_>>().join("; ")
}

fn refuse(path: &Path, why: &str) -> ServeError {
    ServeError::model(
        format!("{} cannot be read as an ONNX file: {why}", path.display()),
        "torch.onnx.export and `skep model export --onnx` make such files",
    )
}

/// An error with its causes, on one line of bearable length.
fn reason(error: &TractError) -> String {
    let text = format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(LONGEST_REASON) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
