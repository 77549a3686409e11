//! HDF5 as h5py and Keras write it, and numpy's arrays without the zip around them, whose checksums
//! would keep a fuzzer out. What is read is averaged with itself and written again.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use skep_data::model_file::{self, Average, npz};
use skep_data::{LoadedTensor, ModelFormat};

fn check(tensor: &LoadedTensor) {
    let bits = tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize();
    assert_eq!(tensor.bytes.len() * 8, bits);
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(tensor) = npz::array(bytes) {
        check(&tensor);
    }
    // What is no HDF5 is another target's.
    let file = [b"\x89HDF\r\n\x1a\n", bytes.get(8..).unwrap_or_default()].concat();
    let Ok(read) = model_file::read("fuzz", &file) else { return };
    read.tensors.values().for_each(check);
    let mut average = Average::default();
    for weight in [1.0, 2.0] {
        average.add("fuzz", read.tensors.clone(), weight);
    }
    if let Ok(mean) = average.finish() {
        assert_eq!(mean, read.tensors);
    }
    let none = BTreeMap::new();
    if let Ok(again) = model_file::encode(ModelFormat::Hdf5, &read.tensors, &none, Some(&file)) {
        assert_eq!(model_file::parse("again", &again).expect("own"), read.tensors);
    }
});
