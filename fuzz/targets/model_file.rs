//! A model file: safetensors, or PyTorch's zip around a pickle.
#![no_main]

use libfuzzer_sys::fuzz_target;
use skep_data::model_file;

fuzz_target!(|bytes: &[u8]| {
    let Ok(tensors) = model_file::parse("fuzz", bytes) else { return };
    for tensor in tensors.values() {
        let bits = tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize();
        assert_eq!(tensor.bytes.len() * 8, bits);
    }
});
