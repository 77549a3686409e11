//! A shard of a dataset.
#![no_main]

use libfuzzer_sys::fuzz_target;
use skep_data::Table;

fuzz_target!(|bytes: &[u8]| {
    let Ok(table) = Table::from_shard(bytes) else { return };
    let again = Table::from_shard(&table.to_shard()).expect("reads what it writes");
    assert_eq!(again.rows(), table.rows());
    if let Some(last) = table.rows().checked_sub(1) {
        assert_eq!(table.gather(&[last as u64, 0]).expect("rows that are there").rows(), 2);
    }
    assert!(table.gather(&[table.rows() as u64]).is_err());
    assert!(table.gather(&[u64::MAX]).is_err());
    let _ = table.slice(0..table.rows());
    for column in table.columns() {
        let _ = (column.i64s(), column.f32s());
    }
});
