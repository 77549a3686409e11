//! `skep model inspect`: what is in a model file.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use skep_data::{LoadedTensor, model_file};
use skep_learn::onnx;

use crate::failure::Failure;
use crate::progress::thousands;

/// What to look into.
#[derive(Args, Clone, Debug)]
pub(crate) struct InspectFlags {
    /// A model file: .safetensors, .npz, .pt, .pth, .h5, .keras or .onnx
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// As JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn inspect(flags: &InspectFlags) -> Result<ExitCode, Failure> {
    let name = flags.file.to_string_lossy();
    let bytes = model_file::read_bytes(&flags.file)?;
    let digest = Sha256::digest(&bytes);
    let hash: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let is_onnx = flags.file.extension().is_some_and(|ending| ending == "onnx");
    let summary = if is_onnx {
        of_onnx(&name, &bytes)?
    } else {
        let file = model_file::read(&name, &bytes)?;
        let tensors: Vec<Row> = file.tensors.iter().map(Row::of).collect();
        Summary {
            format: file.format.to_string(),
            layers: file.metadata.get("model_config").map_or_else(Vec::new, |text| layers(text)),
            metadata: file.metadata,
            ports: Vec::new(),
            operators: Vec::new(),
            tensors,
        }
    };
    if flags.json {
        println!("{}", summary.json(&name, bytes.len(), &hash));
    } else {
        summary.print(&name, bytes.len(), &hash);
    }
    Ok(ExitCode::SUCCESS)
}

/// One tensor.
struct Row {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: usize,
    /// Lowest, mean and highest of its finite numbers.
    range: Option<[f64; 3]>,
    nan: usize,
    infinite: usize,
}

impl Row {
    fn of((name, tensor): (&String, &LoadedTensor)) -> Self {
        let values = tensor.values().unwrap_or_default();
        let finite = || values.iter().copied().filter(|value| value.is_finite());
        let count = finite().count();
        let range = (count > 0).then(|| {
            let mean = finite().sum::<f64>() / count as f64;
            [
                finite().fold(f64::INFINITY, f64::min),
                mean,
                finite().fold(f64::NEG_INFINITY, f64::max),
            ]
        });
        Self {
            name: name.clone(),
            dtype: format!("{:?}", tensor.dtype),
            shape: tensor.shape.clone(),
            bytes: tensor.bytes.len(),
            range,
            nan: values.iter().filter(|value| value.is_nan()).count(),
            infinite: values.iter().filter(|value| value.is_infinite()).count(),
        }
    }

    fn numbers(&self) -> usize {
        self.shape.iter().product()
    }
}

/// What is shown.
struct Summary {
    format: String,
    metadata: BTreeMap<String, String>,
    /// Keras' layers: name and class.
    layers: Vec<(String, String)>,
    /// What goes into an ONNX model and comes out of it.
    ports: Vec<(&'static str, onnx::Port)>,
    operators: Vec<String>,
    tensors: Vec<Row>,
}

/// The layers of a Keras model, by name and class.
fn layers(config: &str) -> Vec<(String, String)> {
    let config: Value = serde_json::from_str(config).unwrap_or_default();
    let list = config.pointer("/config/layers").and_then(Value::as_array);
    let layer = |layer: &Value| {
        let name = layer.pointer("/config/name").or(layer.get("name"))?.as_str()?;
        Some((name.to_owned(), layer.get("class_name")?.as_str()?.to_owned()))
    };
    list.into_iter().flatten().filter_map(layer).collect()
}

fn of_onnx(name: &str, bytes: &[u8]) -> Result<Summary, Failure> {
    let model = onnx::Model::decode_file(bytes)
        .map_err(|error| Failure::mistake(format!("{name} is no ONNX file: {error}")))?;
    let inputs = model.inputs().into_iter().map(|port| ("input", port));
    let outputs = model.outputs().into_iter().map(|port| ("output", port));
    let ports: Vec<_> = inputs.chain(outputs).collect();
    if ports.is_empty() {
        return Err(Failure::mistake(format!("{name} is no ONNX file: it has no outputs")));
    }
    let mut operators: Vec<String> = model.operators().map(str::to_owned).collect();
    operators.dedup();
    let row = |(name, shape, bytes): (&str, &[i64], usize)| Row {
        name: name.to_owned(),
        dtype: String::new(),
        shape: shape.iter().map(|&side| usize::try_from(side).unwrap_or_default()).collect(),
        bytes,
        range: None,
        nan: 0,
        infinite: 0,
    };
    Ok(Summary {
        format: "ONNX".to_owned(),
        metadata: model.properties().map(|(key, value)| (key.into(), value.into())).collect(),
        layers: Vec::new(),
        ports,
        operators,
        tensors: model.weights().map(row).collect(),
    })
}

impl Summary {
    fn json(&self, name: &str, bytes: usize, hash: &str) -> Value {
        let tensor = |row: &Row| {
            let [min, mean, max] = row.range.map_or([None; 3], |range| range.map(Some));
            json!({
                "name": row.name, "dtype": row.dtype, "shape": row.shape, "bytes": row.bytes,
                "min": min, "mean": mean, "max": max, "nan": row.nan, "infinite": row.infinite,
            })
        };
        let port = |(way, port): &(&str, onnx::Port)| json!({ "way": way, "name": port.name, "shape": port.shape, "element": port.element });
        let layer = |(name, class): &(String, String)| json!({ "name": name, "class": class });
        json!({
            "file": name,
            "format": self.format,
            "bytes": bytes,
            "sha256": hash,
            "metadata": self.metadata,
            "layers": self.layers.iter().map(layer).collect::<Vec<_>>(),
            "ports": self.ports.iter().map(port).collect::<Vec<_>>(),
            "numbers": self.tensors.iter().map(Row::numbers).sum::<usize>(),
            "tensors": self.tensors.iter().map(tensor).collect::<Vec<_>>(),
        })
    }

    fn print(&self, name: &str, bytes: usize, hash: &str) {
        let numbers: usize = self.tensors.iter().map(Row::numbers).sum();
        println!("{name}: {}, {} bytes", self.format, thousands(bytes as u64));
        println!("sha256 {hash}");
        for (key, value) in &self.metadata {
            let mut short: String = value.chars().take(60).collect();
            if short.len() < value.len() {
                short = format!("{short}… ({} bytes)", thousands(value.len() as u64));
            }
            println!("{key}  {short}");
        }
        for (way, port) in &self.ports {
            println!("{way} {}  [{}]", port.name, port.shape.join(", "));
        }
        if !self.operators.is_empty() {
            println!("operators  {}", self.operators.join(", "));
        }
        for (name, class) in &self.layers {
            println!("layer {name}  {class}");
        }
        println!("{} tensors, {} numbers", self.tensors.len(), thousands(numbers as u64));
        let wide = |text: &dyn Fn(&Row) -> usize, least: usize| {
            self.tensors.iter().map(text).max().unwrap_or(0).max(least)
        };
        let name_width = wide(&|row| row.name.len(), 4);
        let shape_width = wide(&|row| format!("{:?}", row.shape).len(), 5);
        println!(
            "{:<name_width$}  {:<4}  {:<shape_width$}  {:>11}  {:>11}  {:>11}",
            "name", "type", "shape", "min", "mean", "max"
        );
        for row in &self.tensors {
            let number = |at: usize| row.range.map_or("-".to_owned(), |r| format!("{:.5}", r[at]));
            let mut strange = String::new();
            if row.nan > 0 {
                strange.push_str(&format!("  {} NaN", row.nan));
            }
            if row.infinite > 0 {
                strange.push_str(&format!("  {} infinite", row.infinite));
            }
            println!(
                "{:<name_width$}  {:<4}  {:<shape_width$}  {:>11}  {:>11}  {:>11}{strange}",
                row.name,
                row.dtype,
                format!("{:?}", row.shape),
                number(0),
                number(1),
                number(2)
            );
        }
    }
}
