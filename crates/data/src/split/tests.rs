use std::collections::BTreeSet;
use std::path::Path;

use skep_wire::Dtype;

use super::*;
use crate::table_file::TableForm;
use crate::{
    Column, DataError, Dataset, Fault, Faults, PrepareSettings, RowSplit, Store, Table, classes,
};

fn numbered(first: i64, rows: i64) -> Table {
    let bytes =
        |numbers: &mut dyn Iterator<Item = i64>| numbers.flat_map(i64::to_le_bytes).collect();
    let ids = first..first + rows;
    Table::new(vec![
        Column {
            name: "id".into(),
            dtype: Dtype::I64,
            shape: vec![],
            bytes: bytes(&mut ids.clone()),
        },
        Column {
            name: "label".into(),
            dtype: Dtype::U8,
            shape: vec![],
            bytes: ids.map(|id| (id % 3) as u8).collect(),
        },
    ])
    .expect("a good table")
}

fn dataset() -> Dataset {
    let names = ["ant", "bee", "cicada"].map(str::to_owned);
    Dataset {
        source: "insects".to_owned(),
        train: numbered(0, 100),
        validation: None,
        test: numbered(1000, 10),
        assets: vec![classes::asset(&names)],
    }
}

fn settings(shards: usize, form: TableForm) -> SplitSettings {
    let split = RowSplit::Shuffled;
    SplitSettings {
        prepare: PrepareSettings { shards: Some(shards), copies: 1, validation: 0.1, split },
        form,
    }
}

fn write(folder: &Path, settings: &SplitSettings, copies: Option<usize>) -> Vec<Description> {
    let store = Store::open(&folder.to_string_lossy()).expect("opens");
    let dataset = dataset();
    let writer = Writer::new(&dataset, settings).expect("can be cut");
    let all = writer.files();
    let mut seen = 0;
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("starts");
    let written = runtime.block_on(writer.write(&store, copies, |_| seen += 1)).expect("writes");
    assert_eq!(seen, all);
    written
}

fn ids(table: &Table) -> Vec<i64> {
    table.column("id").expect("is there").i64s().expect("numbers").into_owned()
}

fn read(path: &Path) -> Dataset {
    open(&path.to_string_lossy()).expect("opens").expect("is ours")
}

fn error(path: &Path) -> String {
    open(&path.to_string_lossy()).expect_err("is refused").to_string()
}

#[test]
fn shards_are_disjoint_and_complete_in_every_form() {
    for form in [TableForm::Npz, TableForm::Safetensors, TableForm::TarGz] {
        let folder = tempfile::tempdir().expect("a folder");
        let written = write(folder.path(), &settings(4, form), None);
        let [description] = &written[..] else { panic!("one folder") };
        assert_eq!(description.samples(KeptSplit::Train), 90);
        let mut seen = BTreeSet::new();
        for file in description.of(KeptSplit::Train) {
            let shard = read(&folder.path().join(&file.path));
            assert_eq!(shard.train.rows() as u64, file.samples);
            assert_eq!(ids(&shard.test), (1000..1010).collect::<Vec<_>>());
            assert_eq!(shard.assets, dataset().assets);
            for id in ids(&shard.train) {
                assert!(seen.insert(id), "{id} is in two shards");
            }
        }
        let whole = read(folder.path());
        assert_eq!(ids(&whole.train).into_iter().collect::<BTreeSet<_>>(), seen);
        for id in ids(&whole.validation.expect("was held out")) {
            assert!(seen.insert(id), "{id} is in a shard and held out");
        }
        assert_eq!(seen, (0..100).collect());
        assert_eq!(description.classes.iter().map(|class| class.train).sum::<u64>(), 90);
        assert_eq!(description.classes[1].name, "bee");
        // The same data gives the same files.
        let again = tempfile::tempdir().expect("a folder");
        assert_eq!(write(again.path(), &settings(4, form), None), written);
    }
}

#[test]
fn a_split_by_label_is_described_label_by_label() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut settings = settings(3, TableForm::Npz);
    settings.prepare.split = RowSplit::Label;
    let written = write(folder.path(), &settings, None);
    let most: Vec<usize> = written[0].of(KeptSplit::Train).map(|file| file.labels.len()).collect();
    assert!(most.iter().all(|&labels| labels <= 2), "{most:?}");
    assert_eq!(written[0].split, RowSplit::Label);
}

#[test]
fn copies_are_whole_and_say_which_they_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let written = write(folder.path(), &settings(1, TableForm::Npz), Some(3));
    assert_eq!(written.len(), 3);
    let first = read(&folder.path().join("copy-1"));
    assert_eq!(first.train.rows(), 90);
    let third = read(&folder.path().join("copy-3"));
    assert_eq!((&first.train, &first.test), (&third.train, &third.test));
    assert_eq!(written[2].copy, Some(CopyNumber { number: 3, of: 3 }));
    assert!(open(&folder.path().to_string_lossy()).expect("no mistake").is_none());
}

#[test]
fn a_dataset_that_is_there_is_never_written_over() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), &settings(2, TableForm::Npz), None);
    let store = Store::open(&folder.path().to_string_lossy()).expect("opens");
    let dataset = dataset();
    let writer = Writer::new(&dataset, &settings(3, TableForm::Npz)).expect("can be cut");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("starts");
    let error = runtime.block_on(writer.write(&store, None, |_| {})).expect_err("is there");
    assert!(error.to_string().contains("there is a dataset in"), "{error}");
    assert_eq!(read(folder.path()).train.rows(), 90);
}

#[test]
fn files_that_are_not_the_described_ones_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), &settings(2, TableForm::Safetensors), None);
    let shard = folder.path().join("train-00002-of-00002.safetensors");
    let good = std::fs::read(&shard).expect("is there");

    std::fs::write(&shard, &good[..good.len() / 2]).expect("writes");
    let cut = error(folder.path());
    assert!(cut.contains("train-00002") && cut.contains("cut short"), "{cut}");
    let mut other = good.clone();
    *other.last_mut().expect("has bytes") ^= 1;
    std::fs::write(&shard, other).expect("writes");
    assert!(error(&shard).contains("SHA-256"));
    // The other shard can still be trained on.
    let first = folder.path().join("train-00001-of-00002.safetensors");
    assert_eq!(read(&first).train.rows(), 45);

    // Other columns, with a description of a right hash.
    let wide = Table::new(vec![
        Column { name: "id".into(), dtype: Dtype::I64, shape: vec![2], bytes: vec![0; 32] },
        Column { name: "more".into(), dtype: Dtype::U8, shape: vec![], bytes: vec![0; 2] },
    ]);
    let bytes = wide.expect("a good table").to_shard();
    let path = folder.path().join(DESCRIPTION);
    let text = std::fs::read(&path).expect("is there");
    let mut description = Description::parse("x", &text).expect("own").expect("ours");
    let file = description.files.iter_mut().find(|file| file.path.contains("00002-of"));
    let file = file.expect("is described");
    (file.bytes, file.sha256) = (bytes.len() as u64, crate::shard_hash(&bytes));
    std::fs::write(&path, description.to_json()).expect("writes");
    std::fs::write(&shard, bytes).expect("writes");
    let other = error(&shard);
    for part in [
        "train-00002",
        "`id` I64 [2] instead of `id` I64 []",
        "lacks `label` U8 []",
        "also has `more` U8 []",
    ] {
        assert!(other.contains(part), "{other}");
    }

    std::fs::write(folder.path().join("classes.json"), b"[\"x\"]").expect("writes");
    assert!(error(&first).contains("classes.json"));
    std::fs::remove_file(&path).expect("is there");
    assert!(error(&first).contains("needs the `dataset.json` beside it"));
    assert!(open("/nowhere/train-00001-of-00002.npz").expect("not ours").is_none());
}

#[test]
fn the_test_set_is_not_trained_on_and_strangers_are_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), &settings(2, TableForm::Npz), None);
    assert!(error(&folder.path().join("test.npz")).contains("it is the test set"));
    std::fs::write(folder.path().join("train-00003-of-00002.npz"), b"x").expect("writes");
    assert!(error(&folder.path().join("train-00003-of-00002.npz")).contains("not among"));
    let other = folder.path().join("mine.npz");
    std::fs::write(&other, b"x").expect("writes");
    assert!(open(&other.to_string_lossy()).expect("not ours").is_none());
}

#[test]
fn descriptions_that_point_elsewhere_or_promise_too_much_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let written = write(folder.path(), &settings(1, TableForm::Npz), None);
    let text = String::from_utf8(written[0].to_json()).expect("text");
    let path = folder.path().join(DESCRIPTION);
    for (from, to, part) in [
        ("\"test.npz\"", "\"../test.npz\"", "not the name of a file"),
        ("\"test.npz\"", "\"test.csv\"", "no .npz"),
        ("\"format\": 1", "\"format\": 2", "use a newer one"),
        ("\"samples\": 90", "\"samples\": 99999999999999", "more than"),
        ("\"samples\": 90", "\"samples\": 89", "rows instead of 89"),
        ("\"split\": \"test\"", "\"split\": \"train\"", "no file with test rows"),
        ("\"sha256\"", "\"md5\"", "not a description"),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(&path, text.replace(from, to)).expect("writes");
        let error = error(folder.path());
        assert!(error.contains(part), "{error}");
    }
    std::fs::write(&path, "{\"kind\": \"other\"}").expect("writes");
    assert!(open(&folder.path().to_string_lossy()).expect("not ours").is_none());
    let bad: Result<_, DataError> = Description::parse("x", b"[");
    assert!(bad.is_err());
}

#[test]
fn a_folder_whose_writing_was_cut_short_is_no_dataset() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("starts");
    let dataset = dataset();
    // Three shards' files, validation, test, classes; the description would be the seventh.
    for allowed in 0..6 {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().to_string_lossy()).expect("opens");
        let faults = Faults::new(&store, Fault::DiskFull, allowed);
        let writer = Writer::new(&dataset, &settings(3, TableForm::Npz)).expect("can be cut");
        let written = runtime.block_on(writer.write(&faults.store(), None, |_| {}));
        assert!(matches!(written, Err(DataError::NoSpace { .. })), "{written:?}");
        assert!(open(&folder.path().to_string_lossy()).expect("not ours").is_none());
        // Once there is room, the same command does it.
        let writer = Writer::new(&dataset, &settings(3, TableForm::Npz)).expect("can be cut");
        runtime.block_on(writer.write(&store, None, |_| {})).expect("writes");
        assert_eq!(read(folder.path()).train.rows(), 90);
    }
}
