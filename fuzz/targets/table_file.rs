//! Files of rows in all their forms, by the first byte, and the description of a split dataset.
#![no_main]

use libfuzzer_sys::fuzz_target;
use skep_data::split::Description;
use skep_data::table_file::TableForm;

/// As much as may be unpacked.
const MOST: u64 = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, rest)) = bytes.split_first() else { return };
    let form = match first % 4 {
        0 => TableForm::Npz,
        1 => TableForm::Safetensors,
        2 => TableForm::TarGz,
        _ => {
            if let Ok(Some(description)) = Description::parse("fuzz", rest) {
                let again = Description::parse("again", &description.to_json());
                assert_eq!(again.expect("own").expect("ours"), description);
            }
            return;
        }
    };
    if let Ok(table) = form.decode("fuzz", rest, MOST) {
        assert!(table.rows() * table.row_bytes() <= (MOST as usize + (1 << 20)).max(rest.len()));
        if let Ok(again) = form.encode(&table) {
            assert_eq!(form.decode("again", &again, MOST << 5).expect("own file"), table);
        }
    }
});
