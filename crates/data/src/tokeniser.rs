//! The words of a text, the same everywhere: whoever trains and whoever serves a model must cut a
//! text in the same way, so the rule is short enough to be written again in any language.
//!
//! 1. HTML line breaks (`<br>`, `<br/>`, `<br />`, in either case) are spaces.
//! 2. A word is a run of letters and digits (Unicode's). An apostrophe, `'` or `’`, that has a
//!    letter or digit on both sides belongs to the word, as `'`. Everything else separates words.
//! 3. Words are in lower case (Unicode's, letter by letter).
//! 4. A word of more than 64 characters is cut to its first 64.

/// The most characters of a word.
const MOST_CHARACTERS: usize = 64;

/// Calls `take` with every word of a text, in order. It never fails: any text is some words.
pub fn each_word(text: &str, mut take: impl FnMut(&str)) {
    let mut word = String::new();
    let mut length = 0;
    let mut rest = text.char_indices().peekable();
    while let Some((at, character)) = rest.next() {
        let apostrophe = matches!(character, '\'' | '\u{2019}')
            && length > 0
            && rest.peek().is_some_and(|&(_, next)| next.is_alphanumeric());
        if character.is_alphanumeric() || apostrophe {
            if length < MOST_CHARACTERS {
                match apostrophe {
                    true => word.push('\''),
                    false => word.extend(character.to_lowercase()),
                }
            }
            length += 1;
            continue;
        }
        if length > 0 {
            take(&word);
            word.clear();
            length = 0;
        }
        if character == '<' {
            let end = at + line_break(&text.as_bytes()[at..]);
            while rest.peek().is_some_and(|&(next, _)| next < end) {
                rest.next();
            }
        }
    }
    if length > 0 {
        take(&word);
    }
}

/// The words of a text.
pub fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    each_word(text, |word| words.push(word.to_owned()));
    words
}

/// How long the HTML line break is that the bytes start with; 0 for none.
fn line_break(bytes: &[u8]) -> usize {
    let [b'<', b'b' | b'B', b'r' | b'R', rest @ ..] = bytes else { return 0 };
    let spaces = rest.iter().take_while(|&&byte| byte == b' ').count();
    let slash = usize::from(rest.get(spaces) == Some(&b'/'));
    if rest.get(spaces + slash) == Some(&b'>') { 3 + spaces + slash + 1 } else { 0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn texts_are_cut_by_the_written_rule() {
        for (text, expected) in [
            ("", &[][..]),
            ("  ... !? ", &[]),
            ("Don't PANIC!", &["don't", "panic"]),
            ("it\u{2019}s 'quoted' o'", &["it's", "quoted", "o"]),
            ("one<br />two<BR/>three<br>four", &["one", "two", "three", "four"]),
            ("a<b and c<bright>d", &["a", "b", "and", "c", "bright", "d"]),
            ("8/10, well-made_film", &["8", "10", "well", "made", "film"]),
            ("Été ÀLA 北京", &["été", "àla", "北京"]),
            ("rock 'n' roll''s", &["rock", "n", "roll", "s"]),
        ] {
            assert_eq!(words(text), expected, "{text}");
        }
        let long = "x".repeat(1000);
        assert_eq!(words(&format!("{long} y")), [&long[..64], "y"]);
    }

    proptest! {
        #[test]
        fn any_text_is_some_words(text in any::<String>(), more in "[a-zA-Z'<br />’é.\\s]{0,60}") {
            for text in [&text, &more] {
                let found = words(text);
                for word in &found {
                    prop_assert!(!word.is_empty() && word.chars().count() <= 3 * MOST_CHARACTERS);
                    prop_assert!(word.chars().all(|c| !c.is_whitespace() && c != '<'));
                }
                // Cutting is done once and for all: the words of the words are the words, but
                // where lower case makes a letter something else.
                if text.is_ascii() {
                    prop_assert_eq!(&words(&found.join(" ")), &found);
                }
            }
        }
    }
}
