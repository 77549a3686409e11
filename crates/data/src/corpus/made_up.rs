//! Reviews of Skep's own making, so that `skep train imdb` works without a download. No person
//! wrote them and none is from IMDB: they are sentences put together by the small grammar below,
//! always the same ones. A model that learns which words praise and which blame gets nearly all of
//! them right, in spite of the sentences that say the opposite of the verdict.

use super::{Corpus, Set};
use crate::DataError;

const TRAIN: usize = 2000;
const TEST: usize = 500;

const KINDS: [&str; 12] = [
    "film",
    "movie",
    "comedy",
    "drama",
    "thriller",
    "western",
    "documentary",
    "sequel",
    "remake",
    "musical",
    "picture",
    "story",
];
const PARTS: [&str; 14] = [
    "plot",
    "acting",
    "music",
    "ending",
    "script",
    "camera work",
    "cast",
    "dialogue",
    "opening",
    "pace",
    "second half",
    "lead",
    "humour",
    "setting",
];
const PRAISE: [&str; 24] = [
    "wonderful",
    "brilliant",
    "moving",
    "charming",
    "superb",
    "delightful",
    "gripping",
    "clever",
    "beautiful",
    "memorable",
    "excellent",
    "touching",
    "fresh",
    "warm",
    "flawless",
    "stunning",
    "honest",
    "lively",
    "rich",
    "graceful",
    "magnificent",
    "funny",
    "thoughtful",
    "perfect",
];
const BLAME: [&str; 24] = [
    "awful",
    "dull",
    "boring",
    "clumsy",
    "dreadful",
    "tedious",
    "silly",
    "lifeless",
    "predictable",
    "terrible",
    "wooden",
    "shallow",
    "messy",
    "stale",
    "painful",
    "pointless",
    "ugly",
    "lazy",
    "bland",
    "hollow",
    "annoying",
    "weak",
    "forgettable",
    "cheap",
];
const PRAISING: [&str; 8] = [
    "I loved every minute of it.",
    "See it while you can!",
    "I would gladly watch it again.",
    "It stayed with me for days.",
    "My whole family enjoyed it.",
    "Highly recommended.",
    "It deserves every award it won.",
    "I left the cinema smiling.",
];
const BLAMING: [&str; 8] = [
    "I want my two hours back.",
    "Avoid it at all costs!",
    "I nearly fell asleep.",
    "We walked out before the end.",
    "What a waste of talent.",
    "Save your money.",
    "I can't understand who paid for this.",
    "Even the popcorn was better.",
];
const NEUTRAL: [&str; 12] = [
    "I saw it on a Tuesday with my sister.",
    "It runs for about two hours.",
    "The director has made three others.",
    "It's set in a small town by the sea.",
    "We watched it at home.",
    "It came out last autumn.",
    "There is a dog in it, and a train.",
    "The second act moves to the city.",
    "A friend had told me about it.",
    "Most of it was shot at night.",
    "It is based on a book that I haven't read.",
    "The poster shows a red umbrella.",
];
const VERY: [&str; 6] = ["", "very ", "really ", "simply ", "quite ", "truly "];

pub(super) fn read(corpus: &mut Corpus) -> Result<(), DataError> {
    let mut dice = Dice(0);
    for place in 0..TRAIN + TEST {
        let set = if place < TRAIN { Set::Train } else { Set::Test };
        let label = (place % 2) as u8;
        let text = review(&mut dice, label == 1);
        corpus.add_text("", set, label, &text)?;
    }
    Ok(())
}

/// Three to seven sentences; of those with an opinion, one in eight has the other one.
fn review(dice: &mut Dice, praises: bool) -> String {
    let mut sentences = Vec::new();
    for _ in 0..3 + dice.below(5) {
        let opinion = praises != (dice.below(8) == 0);
        let (words, verdicts) = if opinion { (PRAISE, PRAISING) } else { (BLAME, BLAMING) };
        let very = dice.pick(&VERY);
        let (part, kind) = (dice.pick(&PARTS), dice.pick(&KINDS));
        let (first, second) = (dice.pick(&words), dice.pick(&words));
        sentences.push(match dice.below(7) {
            0 => format!("The {part} is {very}{first}."),
            1 => format!("This {kind} has a {first} {part} and a {second} {}.", dice.pick(&PARTS)),
            2 => format!("What a {first}, {second} {kind}!"),
            3 => format!("I found the {part} {very}{first}, and the {kind} {second}."),
            4 => dice.pick(&verdicts).to_owned(),
            _ => dice.pick(&NEUTRAL).to_owned(),
        });
    }
    sentences.join(" ")
}

/// SplitMix64, written out so that the texts are the same for ever.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^= number >> 31;
        ((u128::from(number) * sides as u128) >> 64) as usize
    }

    fn pick<'word>(&mut self, words: &[&'word str]) -> &'word str {
        words[self.below(words.len())]
    }
}
