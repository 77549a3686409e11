//! Files that real PyTorch made (`fixtures/make.py`), and hostile ones that it did not.

use std::collections::BTreeMap;
use std::path::PathBuf;

use proptest::prelude::*;
use skep_data::model_file::{LoadedTensor, load, parse};
use skep_data::{DataError, read_state_dict};
use skep_wire::Dtype;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn read(name: &str) -> BTreeMap<String, LoadedTensor> {
    load(fixture(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn refusal(name: &str) -> String {
    load(fixture(name)).expect_err("must be refused").to_string()
}

fn floats(tensor: &LoadedTensor) -> Vec<f32> {
    assert_eq!(tensor.dtype, Dtype::F32);
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
    tensor.bytes.chunks_exact(4).map(number).collect()
}

fn grid() -> Vec<f32> {
    (0..12u8).map(f32::from).collect()
}

const GRID_TRANSPOSED: [f32; 12] = [0., 4., 8., 1., 5., 9., 2., 6., 10., 3., 7., 11.];

#[test]
fn a_state_dict_is_read() {
    let loaded = read("plain.pth");
    assert_eq!(loaded.keys().collect::<Vec<_>>(), ["fc.bias", "fc.weight", "steps"]);
    assert_eq!(loaded["fc.weight"].shape, [3, 4]);
    assert_eq!(floats(&loaded["fc.weight"]), grid());
    assert_eq!(floats(&loaded["fc.bias"]), [0.5, -1.5, 2.0]);
    assert_eq!(loaded["steps"].shape, [0usize; 0]);
    assert_eq!(loaded["steps"].bytes, 7i64.to_le_bytes());
}

#[test]
fn a_modules_state_dict_with_its_metadata_is_read() {
    let loaded = read("module.pth");
    assert_eq!(
        loaded.keys().collect::<Vec<_>>(),
        [
            "0.bias",
            "0.weight",
            "1.bias",
            "1.num_batches_tracked",
            "1.running_mean",
            "1.running_var",
            "1.weight"
        ]
    );
    assert_eq!(loaded["0.weight"].shape, [3, 2]);
    assert_eq!(floats(&loaded["0.weight"]), [0.25; 6]);
    assert_eq!(loaded["1.num_batches_tracked"].dtype, Dtype::I64);
}

#[test]
fn views_become_contiguous() {
    let loaded = read("views.pth");
    assert_eq!(loaded["transposed"].shape, [4, 3]);
    assert_eq!(floats(&loaded["transposed"]), GRID_TRANSPOSED);
    assert_eq!(floats(&loaded["column"]), [1., 5., 9.]);
    assert_eq!(loaded["tail"].shape, [2, 2]);
    assert_eq!(floats(&loaded["tail"]), [6., 7., 10., 11.]);
    assert_eq!(loaded["expanded"].shape, [3, 2]);
    assert_eq!(floats(&loaded["expanded"]), [1., 2., 1., 2., 1., 2.]);
    assert_eq!((loaded["empty"].shape.as_slice(), loaded["empty"].bytes.len()), (&[0, 5][..], 0));
    assert_eq!(floats(&loaded["row"]), [4., 5., 6., 7.]);
}

#[test]
fn every_element_type_is_read() {
    let loaded = read("dtypes.pth");
    let expected: [(&str, Dtype, Vec<u8>); 9] = [
        ("f16", Dtype::F16, vec![0x00, 0x3e, 0x00, 0xc0]),
        ("bf16", Dtype::BF16, vec![0xc0, 0x3f, 0x00, 0xc0]),
        ("f64", Dtype::F64, [1.5f64.to_le_bytes(), (-2f64).to_le_bytes()].concat()),
        ("i64", Dtype::I64, [(-3i64).to_le_bytes(), (1i64 << 40).to_le_bytes()].concat()),
        ("i32", Dtype::I32, [(-3i32).to_le_bytes(), 4i32.to_le_bytes()].concat()),
        ("i16", Dtype::I16, [(-3i16).to_le_bytes(), 4i16.to_le_bytes()].concat()),
        ("i8", Dtype::I8, vec![0xfd, 4]),
        ("u8", Dtype::U8, vec![3, 250]),
        ("bool", Dtype::BOOL, vec![1, 0]),
    ];
    assert_eq!(loaded.len(), expected.len());
    for (name, dtype, bytes) in expected {
        assert_eq!(loaded[name], LoadedTensor { dtype, shape: vec![2], bytes }, "{name}");
    }
}

#[test]
fn parameters_nested_dicts_and_shared_storages_are_read() {
    assert_eq!(floats(&read("parameter.pth")["w"]), GRID_TRANSPOSED);
    let nested = read("nested.pth");
    assert_eq!(nested.keys().collect::<Vec<_>>(), ["w"], "the optimiser's tensors stay out");
    assert_eq!(floats(&nested["w"]), grid());
    let shared = read("shared.pth");
    assert_eq!(floats(&shared["first"]), [0., 1., 2., 3.]);
    assert_eq!(floats(&shared["second"]), [2., 3., 4., 5.]);
    assert_eq!(shared["again"], shared["first"]);
}

#[test]
fn what_is_no_state_dict_is_refused_by_name() {
    for (name, part) in [
        ("hostile-system.pth", "names `posix.system`"),
        ("hostile-cut.pth", "hostile-cut.pth"),
        ("hostile-compressed.pth", "compressed"),
        ("legacy.pth", "before 1.6"),
        ("other.pth", "no tensors: `epoch`"),
        ("list.pth", "holds no dict"),
    ] {
        let error = refusal(name);
        assert!(error.contains(part) && error.contains(name), "{error}");
    }
    assert!(!std::path::Path::new("/tmp/skep-was-here").exists(), "nothing is ever run");
}

/// Writes pickles the way a hostile hand would.
#[derive(Clone, Default)]
struct Program(Vec<u8>);

impl Program {
    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn text(self, text: &str) -> Self {
        self.raw(b"X").raw(&(text.len() as u32).to_le_bytes()).raw(text.as_bytes())
    }

    fn int(self, number: i64) -> Self {
        self.raw(&[0x8a, 8]).raw(&number.to_le_bytes())
    }

    fn ints(self, numbers: &[i64]) -> Self {
        numbers.iter().fold(self.raw(b"("), |program, &number| program.int(number)).raw(b"t")
    }

    /// A tensor over storage `0`.
    fn tensor(self, elements: i64, offset: i64, shape: &[i64], strides: &[i64]) -> Self {
        self.raw(b"ctorch._utils\n_rebuild_tensor_v2\n((")
            .text("storage")
            .raw(b"ctorch\nFloatStorage\n")
            .text("0")
            .text("cpu")
            .int(elements)
            .raw(b"tQ")
            .int(offset)
            .ints(shape)
            .ints(strides)
            .raw(b"\x89}tR")
    }

    /// `{"w": tensor}`, over a storage of six floats.
    fn one(
        elements: i64,
        offset: i64,
        shape: &[i64],
        strides: &[i64],
    ) -> Result<LoadedTensor, DataError> {
        let program = Self::default().raw(b"\x80\x02}").text("w");
        let program = program.tensor(elements, offset, shape, strides).raw(b"s.");
        program.run().map(|loaded| loaded["w"].clone())
    }

    fn run(&self) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
        let storage = [0u8; 24];
        read_state_dict(&self.0, |key| (key == "0").then_some(&storage[..]), 10_000)
    }
}

#[test]
fn shapes_and_strides_stay_within_the_storage() {
    let max = i64::MAX;
    assert_eq!(Program::one(6, 0, &[2, 3], &[3, 1]).expect("fits").bytes.len(), 24);
    assert_eq!(Program::one(6, 5, &[1, 1], &[max, max]).expect("fits").bytes.len(), 4);
    assert_eq!(Program::one(6, 2, &[2, 2], &[2, 1]).expect("fits").bytes.len(), 16);
    assert_eq!(Program::one(6, max, &[0, max, max], &[1, 1, 1]).map(|t| t.bytes.len()).ok(), None);
    assert_eq!(Program::one(6, 9, &[3, 0], &[1, 1]).expect("is empty").bytes.len(), 0);
    type Case<'a> = (i64, i64, &'a [i64], &'a [i64], &'a str);
    let bad: [Case<'_>; 12] = [
        (6, 1, &[2, 3], &[3, 1], "leaves its storage"),
        (6, 0, &[2, 3], &[4, 1], "leaves its storage"),
        (6, 0, &[7], &[1], "leaves its storage"),
        (6, 6, &[], &[], "leaves its storage"),
        (6, max, &[2], &[max], "leaves its storage"),
        (6, 0, &[max, max], &[1, 1], "too large"),
        (6, 0, &[3, 2], &[max, max], "too large"),
        (6, 0, &[1 << 40], &[0], "more than"),
        (6, -1, &[2], &[1], "negative"),
        (6, 0, &[2], &[-1], "negative"),
        (6, 0, &[2], &[1, 1], "as many strides"),
        (7, 0, &[2], &[1], "should have 28 bytes, 24 are there"),
    ];
    for (elements, offset, shape, strides, part) in bad {
        let error = Program::one(elements, offset, shape, strides).expect_err(part).to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(Program::one(max, 0, &[2], &[1]).is_err());
    assert!(Program::one(6, 0, &[1; 33], &[1; 33]).expect_err("rank").to_string().contains("33"));
}

#[test]
fn bombs_stay_small() {
    // Each level holds the one below twice: 2^200 values if anyone unrolled them.
    let mut laughs = Program::default().raw(b"\x80\x02N");
    for _ in 0..200 {
        laughs = laughs.raw(b"q\x002\x86");
    }
    assert!(laughs.raw(b".").run().is_err());
    // One tensor of 24 bytes under many names would be many tensors.
    let mut names = Program::default().raw(b"\x80\x02}").text("t").tensor(6, 0, &[6], &[1]);
    names = names.raw(b"q\x01s");
    for name in 0..500 {
        names = names.text(&name.to_string()).raw(b"h\x01s");
    }
    let error = names.raw(b".").run().expect_err("too much").to_string();
    assert!(error.contains("more than the 10000 bytes"), "{error}");
    // A dict that holds itself, and one million values.
    let own = Program::default().raw(b"\x80\x02}q\x00").text("model").raw(b"h\x00s.");
    assert!(own.run().is_err());
    let many = Program::default().raw(b"\x80\x02").raw(&[b'N'; 1_000_001]).raw(b".");
    assert!(many.run().expect_err("too many").to_string().contains("values"));
    let deep = Program::default().raw(&[b'('; 1_000_000]).raw(b".");
    assert!(deep.run().is_err());
    let long = Program::default().raw(b"X\xff\xff\xff\xff");
    assert!(long.run().expect_err("cut").to_string().contains("too early"));
    assert!(Program::default().raw(&[b'('; (32 << 20) + 1]).run().is_err());
}

#[test]
fn every_other_name_and_instruction_is_refused() {
    for (module, name) in [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "QuantizedStorage"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._utils", "_rebuild_qtensor"),
        ("collections", "defaultdict"),
    ] {
        let old = Program::default().raw(format!("\u{63}{module}\n{name}\n)R.").as_bytes());
        let new = Program::default().text(module).text(name).raw(b"\x93)R.");
        for program in [old, new] {
            let error = program.run().expect_err(name).to_string();
            assert!(error.contains(&format!("`{module}.{name}`")), "{error}");
        }
    }
    // INST, OBJ, NEWOBJ, NEWOBJ_EX, EXT1, PERSID and BUILD of an object.
    for code in [b"i".as_slice(), b"o", b"\x81", b"\x92", b"\x82", b"P", b"N}b"] {
        let program = Program::default().raw(b"(").raw(code).raw(b"os\nsystem\n.");
        assert!(program.run().is_err(), "{code:?}");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Program(bytes.clone()).run();
        let _ = parse("x", &bytes);
    }

    #[test]
    fn arbitrary_instructions_never_panic(
        picks in prop::collection::vec(prop::sample::select(
            b"(.012NK\x05\x01)]}tedulasbqhRQ\x85\x86\x87\x88\x94G".to_vec()), 0..200,
        ),
        at in 0usize..400,
        flip: prop::sample::Index,
        byte: u8,
    ) {
        // In the middle of a good program, so that there is something on the stack.
        let good = Program::default().raw(b"\x80\x02}q\x00(").text("w").tensor(6, 0, &[2, 3], &[3, 1]);
        let mut bytes = good.raw(b"u.").0;
        let at = at % bytes.len();
        bytes.splice(at..at, picks);
        let _ = Program(bytes.clone()).run();
        let flip = flip.index(bytes.len());
        bytes[flip] = byte;
        let _ = Program(bytes).run();
    }

    #[test]
    fn spoilt_files_never_panic(at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
        let mut bytes = std::fs::read(fixture("views.pth")).expect("is there");
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = parse("x", &bytes);
        let _ = parse("x", &bytes[..cut.index(bytes.len())]);
    }

    #[test]
    fn strided_copies_agree_with_indexing(
        shape in prop::collection::vec(1i64..4, 0..4),
        strides in prop::collection::vec(0i64..5, 4),
        offset in 0i64..6,
    ) {
        let strides = &strides[..shape.len()];
        let numbers: Vec<f32> = (0..24u8).map(f32::from).collect();
        let storage: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let program = Program::default().raw(b"\x80\x02}").text("w");
        let program = program.tensor(24, offset, &shape, strides).raw(b"s.");
        let loaded = read_state_dict(&program.0, |_| Some(&storage[..]), 10_000);
        let last: i64 = shape.iter().zip(strides).map(|(side, stride)| (side - 1) * stride).sum();
        prop_assert_eq!(loaded.is_ok(), offset + last < 24);
        if let Ok(loaded) = loaded {
            let count: i64 = shape.iter().product();
            let expected: Vec<f32> = (0..count)
                .map(|mut element| {
                    let mut at = offset;
                    for (side, stride) in shape.iter().zip(strides).rev() {
                        at += element % side * stride;
                        element /= side;
                    }
                    numbers[at as usize]
                })
                .collect();
            prop_assert_eq!(floats(&loaded["w"]), expected);
        }
    }
}
