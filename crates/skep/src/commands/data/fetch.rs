//! `skep data fetch`: public datasets from their homes, or from a mirror of one's own.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use flate2::bufread::MultiGzDecoder;
use serde_json::json;
use sha2::{Digest, Sha256};
use skep_data::{Corpus, DataError, classes};
use skep_worker::Web;
use url::Url;

use crate::cli::runtime;
use crate::download::Download;
use crate::failure::Failure;
use crate::progress::{bar, reading};

/// What to fetch, and where to.
#[derive(Args, Clone, Debug)]
pub(crate) struct FetchFlags {
    /// Which dataset
    #[arg(value_enum)]
    dataset: Name,
    /// The folder for it; data/NAME where it is left out
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// Another place that has the same files, instead of the dataset's homes
    #[arg(long, value_name = "URL")]
    mirror: Option<String>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Name {
    /// Handwritten digits, 60,000 and 10,000
    Mnist,
    /// Clothes, in the form of MNIST
    FashionMnist,
    /// The Large Movie Review Dataset, 25,000 and 25,000
    Imdb,
}

/// A dataset, and where it is to be had.
struct Public {
    name: &'static str,
    /// The first that has a file is taken.
    homes: &'static [&'static str],
    files: &'static [PublicFile],
    /// Names for its labels, where they are not digits.
    classes: &'static [&'static str],
}

struct PublicFile {
    name: &'static str,
    content: Content,
}

/// How a file is known to be the right one.
enum Content {
    /// A gzip file, or what was packed in it: so many bytes with this SHA-256. What packs it may
    /// differ from mirror to mirror.
    Packed { bytes: u64, sha256: &'static str },
    /// Labelled reviews: so many to learn from and so many to measure on, half of each positive.
    Reviews { each: usize },
}

const fn packed(name: &'static str, bytes: u64, sha256: &'static str) -> PublicFile {
    PublicFile { name, content: Content::Packed { bytes, sha256 } }
}

const MNIST: Public = Public {
    name: "mnist",
    homes: &[
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ],
    files: &[
        packed(
            "train-images-idx3-ubyte.gz",
            47_040_016,
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        packed(
            "train-labels-idx1-ubyte.gz",
            60_008,
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        packed(
            "t10k-images-idx3-ubyte.gz",
            7_840_016,
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        packed(
            "t10k-labels-idx1-ubyte.gz",
            10_008,
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ],
    classes: &[],
};

const FASHION_MNIST: Public = Public {
    name: "fashion-mnist",
    homes: &["http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"],
    files: &[
        packed(
            "train-images-idx3-ubyte.gz",
            47_040_016,
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        packed(
            "train-labels-idx1-ubyte.gz",
            60_008,
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        packed(
            "t10k-images-idx3-ubyte.gz",
            7_840_016,
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        packed(
            "t10k-labels-idx1-ubyte.gz",
            10_008,
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ],
    classes: &[
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ],
};

const IMDB: Public = Public {
    name: "imdb",
    homes: &["https://ai.stanford.edu/~amaas/data/sentiment/"],
    files: &[PublicFile { name: "aclImdb_v1.tar.gz", content: Content::Reviews { each: 25_000 } }],
    classes: &[],
};

/// What has not arrived wholly lies here, below the folder.
const PARTIAL: &str = ".partial";

/// Of files whose size is not known beforehand.
const MOST_ARCHIVE_BYTES: u64 = 1 << 30;

pub(crate) fn fetch(flags: &FetchFlags) -> Result<ExitCode, Failure> {
    let public = match flags.dataset {
        Name::Mnist => &MNIST,
        Name::FashionMnist => &FASHION_MNIST,
        Name::Imdb => &IMDB,
    };
    let usual = || Path::new("data").join(public.name);
    let folder = flags.to.clone().unwrap_or_else(usual);
    let homes = homes(public, flags.mirror.as_deref())?;
    let is_new = !folder.exists();
    let fetched = runtime(1)?.block_on(fetch_all(public, &homes, &folder));
    // What is empty was for nothing.
    let _ = std::fs::remove_dir(folder.join(PARTIAL));
    if is_new {
        let _ = std::fs::remove_dir(&folder);
    }
    let fetched = fetched?;
    if flags.json {
        println!("{}", json!({ "dataset": public.name, "to": folder, "fetched": fetched }));
    } else {
        let count = fetched.len();
        let there = public.files.len() - count;
        let already = if there == 0 { String::new() } else { format!(", {there} were there") };
        println!(
            "{} is in {}: {count} files fetched{already}, all checked",
            public.name,
            folder.display()
        );
        println!("train on it with: skep train {} --data {}", public.name, folder.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn homes(public: &Public, mirror: Option<&str>) -> Result<Vec<Url>, Failure> {
    let texts = match &mirror {
        Some(mirror) => vec![*mirror],
        None => public.homes.to_vec(),
    };
    let parse = |text: &str| {
        // Without the slash, the last part would be replaced by a file's name.
        let url = Url::parse(&format!("{}/", text.trim_end_matches('/')));
        let url = url.ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        url.ok_or_else(|| {
            Failure::mistake(format!("--mirror `{text}` is not an address"))
                .hint("addresses look like https://example.org/mnist")
        })
    };
    texts.into_iter().map(parse).collect()
}

/// Fetches what is not there yet; the names of what was fetched.
async fn fetch_all(
    public: &Public,
    homes: &[Url],
    folder: &Path,
) -> Result<Vec<&'static str>, Failure> {
    let partial = folder.join(PARTIAL);
    std::fs::create_dir_all(&partial)
        .map_err(|error| Failure::from(DataError::of_io(&partial.to_string_lossy(), error)))?;
    let web = Web::new()?;
    let mut fetched = Vec::new();
    for file in public.files {
        let place = folder.join(file.name);
        if place.is_file() && file.check(&place).is_ok() {
            continue;
        }
        let mut result = Err(Failure::fault("it has no home"));
        for home in homes {
            let url = home.join(file.name).map_err(|error| Failure::mistake(error.to_string()))?;
            let partial = partial.join(file.name);
            let download = Download { web: &web, url, partial, most: file.most_bytes() };
            result = fetch_one(file, &download, &place).await;
            if result.is_ok() {
                break;
            }
        }
        result?;
        fetched.push(file.name);
    }
    if !public.classes.is_empty() {
        let names: Vec<String> = public.classes.iter().map(|&name| name.to_owned()).collect();
        let (place, asset) = (folder.join(classes::ASSET), classes::asset(&names));
        let staged = partial.join(classes::ASSET);
        let written = std::fs::write(&staged, &asset.bytes);
        written
            .and_then(|()| std::fs::rename(&staged, &place))
            .map_err(|error| Failure::from(DataError::of_io(&place.to_string_lossy(), error)))?;
    }
    Ok(fetched)
}

async fn fetch_one(
    file: &PublicFile,
    download: &Download<'_>,
    place: &Path,
) -> Result<(), Failure> {
    let mut resumed = download.is_begun();
    loop {
        let progress =
            bar(0, "{prefix} {wide_bar:.yellow/238} {bytes}/{total_bytes} {bytes_per_sec} {msg}");
        progress.set_prefix(file.name);
        let arrived = download.run(&progress).await;
        progress.finish_and_clear();
        arrived?;
        match reading(file.name, || file.check(&download.partial)) {
            Ok(()) => return download.finish(place),
            // What was there from before may be to blame: once more, all of it.
            Err(_) if resumed => download.discard(),
            Err(reason) => {
                download.discard();
                return Err(Failure::fault(format!("{}: {reason}", download.url))
                    .hint("nothing was kept; try again, or give another place with --mirror URL"));
            }
        }
        resumed = false;
    }
}

impl PublicFile {
    /// Packing makes nothing much longer.
    fn most_bytes(&self) -> u64 {
        match self.content {
            Content::Packed { bytes, .. } => bytes + (1 << 20),
            Content::Reviews { .. } => MOST_ARCHIVE_BYTES,
        }
    }

    /// Whether a file is the right one, from what is in it.
    fn check(&self, path: &Path) -> Result<(), String> {
        match self.content {
            Content::Packed { bytes, sha256 } => {
                let (found, length) = unpacked_hash(path, bytes + 1)
                    .map_err(|error| format!("not a sound gzip file: {error}"))?;
                if length != bytes {
                    let more = if length > bytes { "more" } else { &length.to_string() };
                    return Err(format!("{bytes} bytes were expected in it, {more} found"));
                }
                if found != sha256 {
                    return Err(format!("its content has the SHA-256 {found}, not {sha256}"));
                }
                Ok(())
            }
            Content::Reviews { each } => {
                let corpus = Corpus::open(&path.to_string_lossy());
                let counts = corpus.map_err(|error| error.to_string())?.counts();
                if counts != [[each / 2; 2]; 2] {
                    return Err(format!(
                        "it has {counts:?} reviews (to learn from and to measure on, negative and \
                         positive), where {} each were expected",
                        each / 2
                    ));
                }
                Ok(())
            }
        }
    }
}

/// The SHA-256 of what a file unpacks to, and its length; no more than `most` bytes are looked at.
fn unpacked_hash(path: &Path, most: u64) -> std::io::Result<(String, u64)> {
    let mut file = BufReader::new(std::fs::File::open(path)?);
    let is_packed = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    let mut reader: Box<dyn Read> =
        if is_packed { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut hash = Sha256::new();
    let length = std::io::copy(&mut reader.by_ref().take(most), &mut hash)?;
    let hex = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((hex, length))
}
