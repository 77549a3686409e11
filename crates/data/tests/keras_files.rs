//! Files that real Keras, h5py and numpy made (`scripts/make_model_fixtures.py`), and files for
//! them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use skep_data::model_file::{self, Average, LoadedTensor};
use skep_data::{ModelFile, ModelFormat};
use skep_wire::Dtype;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(fixture(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn read(name: &str) -> ModelFile {
    model_file::read(name, &bytes(name)).unwrap_or_else(|error| panic!("{error}"))
}

fn refusal(name: &str, bytes: &[u8]) -> String {
    model_file::read(name, bytes).expect_err("must be refused").to_string()
}

fn numbers() -> Vec<f32> {
    (0..12u8).map(f32::from).collect()
}

/// The tensors of a Keras file under the paths that Keras has for its weights: `.h5` has them
/// behind the layer's group, `.weights.h5` and `.keras` by their places in it.
fn by_path(file: &ModelFile) -> BTreeMap<String, LoadedTensor> {
    let mut found = BTreeMap::new();
    for (name, tensor) in &file.tensors {
        let steps: Vec<&str> = name.split('/').collect();
        let path = match steps[..] {
            ["model_weights", _, model, layer, weight] => format!("{model}/{layer}/{weight}"),
            ["layers", layer, "vars", place] => {
                let of_layer = match layer {
                    "batch_normalization" => {
                        ["gamma", "beta", "moving_mean", "moving_variance"].as_slice()
                    }
                    _ => &["kernel", "bias"],
                };
                let layer = match layer {
                    "batch_normalization" => "normed",
                    "dense" => "hidden",
                    _ => "scores",
                };
                format!("small/{layer}/{}", of_layer[place.parse::<usize>().expect("a place")])
            }
            // The optimiser's, which the `.npz` has not.
            _ => continue,
        };
        found.insert(path, tensor.clone());
    }
    found
}

#[test]
fn the_weights_of_every_format_of_keras_are_read() {
    for model in ["a", "b", "c"] {
        let truth = read(&format!("{model}.npz"));
        assert_eq!(truth.format, ModelFormat::Npz);
        assert_eq!(truth.tensors.len(), 8);
        for (ending, format) in [
            ("h5", ModelFormat::Hdf5),
            ("weights.h5", ModelFormat::Hdf5),
            ("keras", ModelFormat::Keras),
        ] {
            let file = read(&format!("{model}.{ending}"));
            assert_eq!(file.format, format);
            assert_eq!(by_path(&file), truth.tensors, "{model}.{ending}");
        }
    }
    for name in ["a.h5", "a.keras"] {
        let config = &read(name).metadata["model_config"];
        assert!(config.contains("BatchNormalization"), "{config}");
    }
}

#[test]
fn an_average_is_numpys_and_leaves_all_else_in_the_file_as_it_was() {
    let truth = read("mean.npz");
    for ending in ["h5", "weights.h5", "keras", "npz"] {
        let mut average = Average::default();
        for (model, weight) in [("a", 3.0), ("b", 1.0), ("c", 1.0)] {
            let name = format!("{model}.{ending}");
            let mut file = read(&name);
            file.take_optimiser();
            average.add(&name, file.tensors, weight);
        }
        let mut tensors = average.finish().expect("the same layers");
        tensors.extend(read(&format!("a.{ending}")).take_optimiser());
        let first = bytes(&format!("a.{ending}"));
        let format = read(&format!("a.{ending}")).format;
        let file = model_file::encode(format, &tensors, &BTreeMap::new(), Some(&first));
        let file = file.expect("fits");
        let again = model_file::read(ending, &file).expect("own file");
        assert_eq!(again.tensors, tensors, "{ending}");
        assert_eq!(again.metadata, read(&format!("a.{ending}")).metadata, "{ending}");
        let found = if ending == "npz" { again.tensors.clone() } else { by_path(&again) };
        for (name, tensor) in &found {
            assert_eq!(*tensor, truth.tensors[name], "{ending}: {name}");
        }
        if format == ModelFormat::Hdf5 {
            assert_eq!(file.len(), first.len(), "nothing but numbers has changed");
            let changed = file.iter().zip(&first).filter(|(a, b)| a != b).count();
            let numbers: usize = tensors.values().map(|tensor| tensor.bytes.len()).sum();
            assert!((1..=numbers).contains(&changed), "{changed} of {numbers}");
        }
    }
}

#[test]
fn other_layers_are_not_averaged() {
    let mut average = Average::default();
    average.add("a.h5", read("a.h5").tensors, 1.0);
    average.add("other.h5", read("other.h5").tensors, 1.0);
    let error = average.finish().expect_err("five units, not three").to_string();
    assert!(error.contains("other.h5") && error.contains("shape [4, 5], not [4, 3]"), "{error}");
}

#[test]
fn every_form_of_h5py_is_read() {
    let file = read("forms.h5");
    assert_eq!(file.metadata["model_config"], r#"{"fixed": true}"#);
    let tensors = file.tensors;
    let wide: Vec<f64> = numbers().into_iter().map(f64::from).collect();
    for name in ["packed", "chunked", "big", "double", "half"] {
        let tensor = &tensors[&format!("group/{name}")];
        assert_eq!(tensor.shape, [3, 4], "{name}");
        assert_eq!(tensor.values().expect("numbers"), wide, "{name}");
    }
    assert_eq!(tensors["group/half"].dtype, Dtype::F16);
    let truth = LoadedTensor { dtype: Dtype::BOOL, shape: vec![2], bytes: vec![1, 0] };
    assert_eq!(tensors["group/truth"], truth);
    let scalar = &tensors["group/scalar"];
    assert_eq!((scalar.dtype, scalar.shape.len()), (Dtype::I64, 0));
    assert_eq!(scalar.bytes, (-5i64).to_le_bytes());
    assert_eq!(tensors["group/empty"].shape, [0, 5]);
    assert_eq!(tensors["group/brain"].dtype, Dtype::BF16);
    assert_eq!(tensors["group/brain"].values().expect("numbers"), [1.5, -2.0]);
    assert_eq!(read("newest.h5").tensors["deep/below/numbers"].values(), Some(wide));
}

#[test]
fn every_form_of_numpy_is_read() {
    let tensors = read("forms.npz").tensors;
    let wide: Vec<f64> = numbers().into_iter().map(f64::from).collect();
    for (name, dtype) in [("column", Dtype::F32), ("big", Dtype::F64), ("half", Dtype::F16)] {
        assert_eq!((tensors[name].dtype, &tensors[name].shape[..]), (dtype, &[3, 4][..]));
        assert_eq!(tensors[name].values().expect("numbers"), wide, "{name}");
    }
    assert_eq!(tensors["truth"].dtype, Dtype::BOOL);
    assert_eq!(tensors["scalar"].values().expect("numbers"), [-5.0]);
}

#[test]
fn numbers_that_lie_in_chunks_are_not_filled_anew() {
    let like = bytes("forms.h5");
    let tensors = read("forms.h5").tensors;
    let encode = |tensors: &BTreeMap<String, LoadedTensor>| {
        model_file::encode(ModelFormat::Hdf5, tensors, &BTreeMap::new(), Some(&like))
    };
    let error = encode(&tensors).expect_err("is compressed").to_string();
    assert!(error.contains("lies in chunks") && error.contains("without compression"), "{error}");
    let plain = model_file::encode(ModelFormat::Hdf5, &tensors, &BTreeMap::new(), None);
    assert_eq!(model_file::parse("own", &plain.expect("plain")).expect("own file"), tensors);
}

#[test]
fn hostile_and_foreign_files_are_refused_by_name() {
    for (name, part) in [
        ("texts.h5", "`words`"),
        ("loop.h5", "contain too much, or each other"),
        ("promises.h5", "more bytes than such a file can"),
        ("bomb.h5", "more bytes than such a file can"),
        ("objects.npz", "`|O`"),
    ] {
        let error = refusal(name, &bytes(name));
        assert!(error.contains(part) && error.contains(name), "{error}");
    }
    for name in ["a.h5", "a.keras", "a.npz", "forms.h5"] {
        let whole = bytes(name);
        for end in [whole.len() / 2, 100, 9] {
            refusal(name, &whole[..end]);
        }
    }
}

proptest! {
    #[test]
    fn damaged_files_are_refused_or_read_but_never_panic(
        name in prop::sample::select(vec!["a.h5", "a.weights.h5", "forms.h5", "newest.h5"]),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        near_the_start in any::<bool>(),
    ) {
        let mut file = bytes(name);
        let length = if near_the_start { 1000 } else { file.len() };
        for (place, byte) in damage {
            // The first bytes say what it is.
            let at = 8 + place.index(length.min(file.len()) - 8);
            file[at] = byte;
        }
        if let Ok(read) = model_file::read(name, &file) {
            for tensor in read.tensors.values() {
                prop_assert_eq!(tensor.bytes.len() * 8, tensor.elements() * tensor.dtype.bitsize());
            }
        }
    }
}

fn tensor() -> impl Strategy<Value = LoadedTensor> {
    let dtypes = [
        Dtype::F64,
        Dtype::F32,
        Dtype::F16,
        Dtype::I64,
        Dtype::I32,
        Dtype::I16,
        Dtype::I8,
        Dtype::U8,
        Dtype::BOOL,
    ];
    let shape = prop::collection::vec(0usize..4, 0..4);
    (prop::sample::select(dtypes.to_vec()), shape, any::<u64>()).prop_map(|(dtype, shape, seed)| {
        let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let byte = |at: usize| seed.rotate_left(at as u32 * 7) as u8;
        let bytes = (0..length).map(byte);
        // A truth value is 0 or 1.
        let bytes = bytes.map(|byte| if dtype == Dtype::BOOL { byte & 1 } else { byte }).collect();
        LoadedTensor { dtype, shape, bytes }
    })
}

proptest! {
    #[test]
    fn what_is_written_in_any_format_is_read_to_the_bit(
        tensors in prop::collection::btree_map("[a-z]{1,4}(\\.[a-z]{1,4}){0,2}", tensor(), 1..6),
        inner in tensor(),
    ) {
        let mut tensors = tensors;
        tensors.insert("group/below/inner".to_owned(), inner);
        let metadata = BTreeMap::from([("made".to_owned(), "here".to_owned())]);
        for format in
            [ModelFormat::Safetensors, ModelFormat::Npz, ModelFormat::Torch, ModelFormat::Hdf5]
        {
            let file = model_file::encode(format, &tensors, &metadata, None).expect("writes");
            let again = model_file::read("own", &file).expect("own file");
            prop_assert_eq!(again.format, format);
            prop_assert_eq!(&again.tensors, &tensors, "{}", format);
            let twice = model_file::encode(format, &tensors, &metadata, None).expect("writes");
            prop_assert!(file == twice, "the same tensors gave other bytes");
        }
    }
}

#[test]
fn types_that_a_format_has_not_are_refused_rather_than_changed() {
    let brain = LoadedTensor { dtype: Dtype::BF16, shape: vec![1], bytes: vec![0, 0x3f] };
    let tensors = BTreeMap::from([("w".to_owned(), brain)]);
    let encode = |format| model_file::encode(format, &tensors, &BTreeMap::new(), None);
    let error = encode(ModelFormat::Npz).expect_err("numpy has none").to_string();
    assert!(error.contains("numpy has no BF16"), "{error}");
    for format in [ModelFormat::Safetensors, ModelFormat::Torch, ModelFormat::Hdf5] {
        let file = encode(format).expect("has it");
        assert_eq!(model_file::parse("own", &file).expect("own file"), tensors);
    }
    let wide = LoadedTensor { dtype: Dtype::U32, shape: vec![1], bytes: vec![1; 4] };
    let tensors = BTreeMap::from([("w".to_owned(), wide.clone()), ("w/x".to_owned(), wide)]);
    let encode = |format| model_file::encode(format, &tensors, &BTreeMap::new(), None);
    assert!(encode(ModelFormat::Torch).is_err());
    assert!(encode(ModelFormat::Hdf5).is_err(), "a dataset is no group");
}

#[test]
fn a_file_is_saved_whole_and_leaves_nothing_beside_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.npz");
    model_file::save(&path, b"first").expect("writes");
    model_file::save(&path, b"second").expect("writes over it");
    assert_eq!(std::fs::read(&path).expect("is there"), b"second");
    assert!(model_file::save(&folder.path().join("none/model.npz"), b"x").is_err());
    assert_eq!(std::fs::read_dir(folder.path()).expect("lists").count(), 1);
}
