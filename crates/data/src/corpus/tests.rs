use std::io::Write;
use std::path::PathBuf;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::*;

const SETTINGS: VocabularySettings = VocabularySettings { words: 100, length: 4 };

/// Two texts of each class to learn from, one of each to measure on.
const TEXTS: [(&str, &str, &str); 6] = [
    ("train/pos", "0_9.txt", "A wonderful film.<br /><br />Wonderful!"),
    ("train/neg", "0_2.txt", "A dreadful film"),
    ("train/pos", "1_10.txt", "Don't miss it"),
    ("train/neg", "1_1.txt", "Miss it"),
    ("test/pos", "0_8.txt", "Wonderful"),
    ("test/neg", "0_3.txt", "Dreadful, unheard of"),
];

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn write_folder(root: &Path) {
    for (place, file, text) in TEXTS {
        std::fs::create_dir_all(root.join(place)).expect("writes");
        std::fs::write(root.join(place).join(file), text).expect("writes");
    }
    std::fs::write(root.join("train/pos/notes.md"), [0xff]).expect("writes");
}

fn archive(texts: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    for (name, text) in texts {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, &text[..]).expect("memory");
    }
    builder.into_inner().expect("memory").finish().expect("memory")
}

fn archived() -> Vec<u8> {
    let named = TEXTS
        .iter()
        .rev()
        .map(|(place, file, text)| (format!("aclImdb/{place}/{file}"), text.as_bytes().to_vec()));
    let mut texts: Vec<_> = named.collect();
    texts.push(("aclImdb/README".to_owned(), vec![0xff; 300]));
    texts.push(("aclImdb/train/unsup/7_0.txt".to_owned(), b"No verdict".to_vec()));
    archive(&texts)
}

fn text_of(path: &Path) -> String {
    path.to_str().expect("plain").to_owned()
}

fn open(path: &Path) -> Result<Dataset, DataError> {
    Corpus::open(&text_of(path))?.dataset(SETTINGS)
}

#[track_caller]
fn refused(path: &Path, parts: &[&str]) {
    let error = open(path).expect_err("cannot be").to_string();
    for part in parts {
        assert!(error.contains(part), "`{error}` lacks `{part}`");
    }
}

fn tokens(table: &Table) -> Vec<Vec<u16>> {
    let column = table.require("tokens", Dtype::U16, &[4]).expect("tokens");
    let numbers: Vec<u16> =
        column.bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
    numbers.chunks(4).map(<[u16]>::to_vec).collect()
}

fn words_of(dataset: &Dataset) -> Vocabulary {
    let asset = &dataset.assets[0];
    assert_eq!(asset.name, "vocabulary.json");
    Vocabulary::parse("it", &asset.bytes).expect("own file")
}

#[test]
fn a_folder_and_its_archive_are_the_same_dataset() {
    let place = folder();
    write_folder(place.path());
    let unpacked = open(place.path()).expect("a folder");
    // By name: neg/0, neg/1, pos/0, pos/1.
    let labels = unpacked.train.column("label").expect("labels").u8s();
    assert_eq!(labels, [0, 0, 1, 1]);
    // Three times wonderful would be most, if the test texts counted.
    let vocabulary = words_of(&unpacked);
    let words = ["a", "film", "it", "miss", "wonderful", "don't", "dreadful"];
    assert_eq!(vocabulary.words(), words);
    assert_eq!(vocabulary.classes(), ["negative", "positive"]);
    assert_eq!(tokens(&unpacked.train)[2], [2, 6, 3, 6]);
    assert_eq!(tokens(&unpacked.test)[0], [8, 1, 1, 0]);
    assert_eq!(vocabulary.encode("Dreadful, unheard of"), [8, 1, 1, 0]);

    let packed = place.path().join("reviews.tar.gz");
    std::fs::write(&packed, archived()).expect("writes");
    let packed = open(&packed).expect("an archive");
    assert_eq!((&packed.train, &packed.test), (&unpacked.train, &unpacked.test));
    assert_eq!(packed.assets, unpacked.assets);
    let alone = folder();
    std::fs::write(alone.path().join("aclImdb_v1.tar.gz"), archived()).expect("writes");
    assert_eq!(open(alone.path()).expect("a folder with it").train, unpacked.train);
    let around = folder();
    write_folder(&around.path().join("aclImdb"));
    assert_eq!(open(around.path()).expect("a folder around it").train, unpacked.train);
}

#[test]
fn sheets_and_lines_are_read_with_or_without_sets() {
    let place = folder();
    let sheet = place.path().join("reviews.csv");
    let mut text = "Review,Sentiment\n".to_owned();
    for _ in 0..2 {
        text.push_str("\"A \"\"good\"\" one, \nindeed\",positive\nbad,negative\n\"good\",pos\n");
        text.push_str("bad bad,0\ngood enough,1\n");
    }
    std::fs::write(&sheet, &text).expect("writes");
    let dataset = open(&sheet).expect("a sheet");
    assert_eq!((dataset.train.rows(), dataset.test.rows()), (8, 2), "every fifth");
    assert_eq!(words_of(&dataset).words()[..2], ["bad", "good"]);

    let lines = place.path().join("reviews.jsonl");
    let text = "{\"text\":\"good\",\"label\":1,\"split\":\"train\"}\n\n\
                {\"text\":\"bad\",\"label\":\"neg\",\"split\":\"train\"}\n\
                {\"text\":\"so so\",\"label\":0,\"split\":\"unsupervised\"}\n\
                {\"text\":\"bad\",\"label\":false,\"split\":\"test\"}";
    std::fs::write(&lines, text).expect("writes");
    let dataset = open(&lines).expect("lines");
    assert_eq!((dataset.train.rows(), dataset.test.rows()), (2, 1));

    refused(place.path(), &["several files", "reviews.csv", "reviews.jsonl"]);
    std::fs::rename(&sheet, place.path().join("train.csv")).expect("renames");
    std::fs::rename(&lines, place.path().join("test.jsonl")).expect("renames");
    let dataset = open(place.path()).expect("one file each");
    assert_eq!((dataset.train.rows(), dataset.test.rows()), (10, 4));
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/keras").join(name)
}

#[test]
fn arrays_of_keras_are_words_again_and_nothing_is_run() {
    let dataset = open(&fixture("imdb.npz")).expect("as numpy wrote it");
    let vocabulary = words_of(&dataset);
    assert_eq!(vocabulary.words(), ["film", "the", "wonderful", "<unknown>", "don't", "dreadful"]);
    assert_eq!(dataset.train.column("label").expect("labels").u8s(), [1, 0, 1, 0]);
    assert_eq!(tokens(&dataset.train)[0], vocabulary.encode("The wonderful film"));
    assert_eq!(tokens(&dataset.test), [[4, 3, 2, 0], [7, 0, 0, 0]]);
    let padded = open(&fixture("padded.npz")).expect("a rectangle");
    assert_eq!(tokens(&padded.train)[0], words_of(&padded).encode("the wonderful"));

    refused(&fixture("hostile.npz"), &["x_train", "`posix.system`", "nothing was run"]);
    assert!(!Path::new("/tmp/skep-was-here").exists());
    let place = folder();
    let copy = place.path().join("imdb.npz");
    std::fs::copy(fixture("imdb.npz"), &copy).expect("copies");
    refused(&copy, &["imdb.npz", "imdb_word_index.json"]);
    std::fs::write(place.path().join("imdb_word_index.json"), "[1]").expect("writes");
    refused(&copy, &["imdb_word_index.json", "not a word index"]);
    std::fs::copy(fixture("imdb_word_index.json"), place.path().join("imdb_word_index.json"))
        .expect("copies");
    let whole = std::fs::read(&copy).expect("reads");
    std::fs::write(&copy, &whole[..whole.len() / 2]).expect("writes");
    refused(&copy, &["imdb.npz", "not a sound .npz"]);
}

#[test]
fn what_cannot_be_read_is_refused_with_what_where_and_what_to_do() {
    let place = folder();
    let path = |name: &str| place.path().join(name);
    refused(place.path(), &["train/pos", ".tar.gz", "Large Movie Review Dataset"]);
    refused(&path("nowhere"), &["nowhere", "`reviews`"]);
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(path(name), bytes).expect("writes");
        path(name)
    };
    refused(&write("x.doc", b"?"), &["x.doc", ".csv"]);
    refused(&write("x.csv", b"title,stars\na,1\n"), &["`title`", "review", "sentiment"]);
    refused(&write("x.csv", b""), &["x.csv", "none", "review"]);
    refused(&write("x.csv", b"text,label\na,7\n"), &["line 2", "`7`", "positive"]);
    refused(&write("x.csv", b"text,label\na,1,2\n"), &["line 2", "3 columns"]);
    refused(&write("x.csv", b"text,label\n\xff\xfe,1\n"), &["line 2", "not UTF-8", "iconv"]);
    refused(&write("x.csv", b"text,label\na,1\n"), &["no negative text"]);
    let one_class = "text,label\n".to_owned() + &"a,1\n".repeat(3) + "a,0\n";
    refused(&write("x.csv", one_class.as_bytes()), &["test set is empty"]);
    refused(&write("x.jsonl", b"{\"text\":\"a\"}"), &["line 1", "sentiment"]);
    refused(&write("x.jsonl", b"nothing"), &["line 1", "JSON"]);
    refused(&write("x.npz", b"nothing"), &["x.npz", "word_index"]);

    let whole = archived();
    refused(&write("x.tar.gz", &whole[..whole.len() / 2]), &["x.tar.gz", "cut short"]);
    refused(&write("x.tar.gz", b"nothing at all"), &["x.tar.gz", "not a sound .tar.gz"]);
    let bad = archive(&[("train/pos/1_9.txt".to_owned(), b"good \xff".to_vec())]);
    refused(&write("x.tar.gz", &bad), &["train/pos/1_9.txt", "byte 6", "not UTF-8"]);
    let other = archive(&[("photo.jpg".to_owned(), vec![0xff; 10])]);
    refused(&write("x.tar.gz", &other), &["no texts under train/pos"]);

    write_folder(&path("set"));
    std::fs::write(path("set/test/neg/9_1.txt"), b"caf\xe9").expect("writes");
    refused(&path("set"), &["9_1.txt", "byte 4", "not UTF-8"]);
    std::fs::remove_dir_all(path("set/test")).expect("removes");
    refused(&path("set"), &["no folder", "test/neg"]);
}

/// A review of 10 MB is cut, wherever it is, even in the middle of a letter.
#[test]
fn texts_without_end_are_cut() {
    let place = folder();
    write_folder(place.path());
    let long = "x".to_owned() + &"é".repeat(5 << 20) + " end";
    std::fs::write(place.path().join("test/pos/2_9.txt"), &long).expect("writes");
    let dataset = open(place.path()).expect("a folder");
    assert_eq!(dataset.test.rows(), 3);
    let packed = archive(&[
        ("train/pos/1_9.txt".to_owned(), long.clone().into_bytes()),
        ("train/neg/1_1.txt".to_owned(), b"bad".to_vec()),
        ("test/neg/1_1.txt".to_owned(), b"bad".to_vec()),
    ]);
    let mut file = std::fs::File::create(place.path().join("x.tgz")).expect("creates");
    file.write_all(&packed).expect("writes");
    let dataset = open(&place.path().join("x.tgz")).expect("an archive");
    assert!(!words_of(&dataset).words().contains(&"end".to_owned()));
    let lines = format!("{{\"text\":\"{long}\",\"label\":1}}\n").repeat(5)
        + "{\"text\":\"bad\",\"label\":0}\n";
    std::fs::write(place.path().join("x.jsonl"), lines).expect("writes");
    assert_eq!(open(&place.path().join("x.jsonl")).expect("lines").train.rows(), 5);
}

#[test]
fn the_built_in_texts_are_always_the_same_and_say_what_they_are() {
    let corpus = Corpus::open(BUILT_IN).expect("built in");
    let dataset = corpus.dataset(VocabularySettings { words: 1000, length: 100 }).expect("made");
    assert!(dataset.source.contains("made up") && dataset.source.contains("not IMDB"));
    assert_eq!((dataset.train.rows(), dataset.test.rows()), (2000, 500));
    for table in [&dataset.train, &dataset.test] {
        let labels = table.column("label").expect("labels").u8s();
        let positive = labels.iter().filter(|&&label| label == 1).count();
        assert_eq!(positive, labels.len() / 2);
    }
    let words = words_of(&dataset);
    assert!((150..400).contains(&words.words().len()), "{}", words.words().len());
    assert_eq!(words.words()[..3], ["a", "the", "and"]);
    let shard = crate::shard_hash(&dataset.train.to_shard());
    assert_eq!(&shard[..16], "ac7211390d92acd2");
}
