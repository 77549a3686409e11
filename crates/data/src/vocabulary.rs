//! A vocabulary: which number stands for which word. It is made from training data, kept with the
//! run as the asset [`Vocabulary::ASSET`], and is all that is needed to feed a trained model with a
//! new text.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::{DataError, tokeniser};

/// Stands for nothing: rows of a table are equally long.
pub const PADDING: u16 = 0;

/// Stands for every word that the vocabulary does not have.
pub const UNKNOWN: u16 = 1;

/// The number of the most frequent word.
const FIRST: usize = 2;

/// The newest form of the file that is known here.
const FORMAT: u64 = 1;

/// Numbers have 16 bits.
pub const MOST_NUMBERS: usize = 1 << 16;

/// The longest row of numbers.
pub const MOST_LENGTH: usize = 1 << 16;

/// How many numbers a vocabulary has, and how many of them a text is cut to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabularySettings {
    /// The numbers, the two for padding and unknown words included: 3 to 65,536.
    pub words: usize,
    /// The words of a text that count: its last ones. 1 to 65,536.
    pub length: usize,
}

/// Which number stands for which word.
#[derive(Clone, Debug, PartialEq)]
pub struct Vocabulary {
    file: File,
    numbers: HashMap<String, u16>,
}

/// `vocabulary.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct File {
    format: u64,
    /// How many numbers a text becomes; of a longer one the last are taken.
    length: usize,
    /// What the classes are called, in the order of the model's outputs.
    classes: Vec<String>,
    /// The word at place `i` has the number `i + 2`.
    words: Vec<String>,
}

impl Vocabulary {
    /// What the asset of a run is called.
    pub const ASSET: &str = "vocabulary.json";

    /// The most frequent words; of equally frequent ones the first in the alphabet.
    pub fn build<'word>(
        counts: impl IntoIterator<Item = (&'word str, u64)>,
        classes: &[&str],
        settings: VocabularySettings,
    ) -> Self {
        let mut counts: Vec<_> = counts.into_iter().filter(|&(_, count)| count > 0).collect();
        counts.sort_unstable_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
        counts.truncate(settings.words.min(MOST_NUMBERS).saturating_sub(FIRST));
        Self::of(File {
            format: FORMAT,
            length: settings.length,
            classes: classes.iter().map(|&class| class.to_owned()).collect(),
            words: counts.into_iter().map(|(word, _)| word.to_owned()).collect(),
        })
    }

    fn of(file: File) -> Self {
        let numbers = file.words.iter().enumerate();
        let numbers = numbers.map(|(at, word)| (word.clone(), (at + FIRST) as u16)).collect();
        Self { file, numbers }
    }

    /// Reads what [`to_json`](Self::to_json) wrote.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, DataError> {
        let refuse = |reason: String| DataError::file(name, reason);
        let file: File = serde_json::from_slice(bytes)
            .map_err(|error| refuse(format!("not a vocabulary: {error}")))?;
        if file.format > FORMAT {
            let (path, found) = (name.to_owned(), file.format);
            return Err(DataError::Format { path, found, known: FORMAT });
        }
        if file.words.len() > MOST_NUMBERS - FIRST || !(1..=MOST_LENGTH).contains(&file.length) {
            return Err(refuse(format!(
                "a vocabulary has at most {} words and a length of 1 to {MOST_LENGTH}",
                MOST_NUMBERS - FIRST
            )));
        }
        let vocabulary = Self::of(file);
        if vocabulary.numbers.len() != vocabulary.file.words.len() {
            return Err(refuse("a word is in the vocabulary twice".to_owned()));
        }
        Ok(vocabulary)
    }

    /// The file: words, classes and length.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(&self.file).expect("texts and numbers are JSON")
    }

    /// How many numbers a text becomes.
    pub fn length(&self) -> usize {
        self.file.length
    }

    /// What the classes are called.
    pub fn classes(&self) -> &[String] {
        &self.file.classes
    }

    /// How many numbers there are, the two for padding and unknown words included.
    pub fn numbers(&self) -> usize {
        FIRST + self.file.words.len()
    }

    /// The words; the one at place `i` has the number `i + 2`.
    pub fn words(&self) -> &[String] {
        &self.file.words
    }

    /// The number of a word.
    pub fn number(&self, word: &str) -> u16 {
        self.numbers.get(word).copied().unwrap_or(UNKNOWN)
    }

    /// A text as a model sees it: the numbers of its last words, filled up with padding. A text
    /// without a word is one unknown word.
    pub fn encode(&self, text: &str) -> Vec<u16> {
        let mut numbers = Vec::new();
        tokeniser::each_word(text, |word| numbers.push(self.number(word)));
        let mut row = Vec::with_capacity(self.length());
        self.fill(&numbers, &mut row);
        row
    }

    /// Appends one row of numbers.
    pub(crate) fn fill(&self, numbers: &[u16], row: &mut Vec<u16>) {
        let length = self.length();
        let end = row.len() + length;
        match numbers {
            [] => row.push(UNKNOWN),
            _ => row.extend_from_slice(&numbers[numbers.len().saturating_sub(length)..]),
        }
        row.resize(end, PADDING);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary(words: usize, length: usize) -> Vocabulary {
        let counts = [("the", 9), ("dull", 2), ("bright", 2), ("rare", 1), ("never", 0)];
        let settings = VocabularySettings { words, length };
        Vocabulary::build(counts, &["negative", "positive"], settings)
    }

    #[test]
    fn frequent_words_come_first_and_the_rest_is_unknown() {
        let some = vocabulary(5, 4);
        assert_eq!(some.words(), ["the", "bright", "dull"]);
        assert_eq!(some.encode("The rare, DULL"), [2, UNKNOWN, 4, PADDING]);
        assert_eq!(some.encode("rare rare the bright dull the"), [2, 3, 4, 2], "the last ones");
        assert_eq!(some.encode(" ?"), [UNKNOWN, PADDING, PADDING, PADDING]);
        assert_eq!(vocabulary(100, 1).words().len(), 4, "what does not occur has no number");
    }

    #[test]
    fn it_survives_its_file_and_others_are_refused() {
        let some = vocabulary(5, 4);
        assert_eq!(Vocabulary::parse("x", &some.to_json()).expect("own file"), some);
        for (text, part) in [
            ("[]", "not a vocabulary"),
            (r#"{"format":2,"length":4,"classes":[],"words":[]}"#, "format 2"),
            (r#"{"format":1,"length":0,"classes":[],"words":[]}"#, "length of 1"),
            (r#"{"format":1,"length":4,"classes":[],"words":["a","a"]}"#, "twice"),
        ] {
            let error = Vocabulary::parse("v.json", text.as_bytes()).expect_err(text).to_string();
            assert!(error.contains(part) && error.contains("v.json"), "{error}");
        }
    }
}
