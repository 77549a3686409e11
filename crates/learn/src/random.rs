//! The generator behind every initial parameter. It is written out here, and keyed by (seed, name
//! of the tensor), so that version 0 is the same on every machine, in every language and whatever
//! order a model declares its layers in. `tests/fixtures/make.py` has it in Python.

/// xoshiro256++ (Blackman and Vigna), seeded by splitmix64.
#[derive(Clone, Debug)]
pub struct Generator([u64; 4]);

impl Generator {
    /// A generator for one tensor of one run.
    pub fn of(seed: u64, name: &str) -> Self {
        // FNV-1a: the name only has to pick a stream.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut state = seed ^ hash;
        let mut splitmix = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        Self([splitmix(), splitmix(), splitmix(), splitmix()])
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.0;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// Uniform from -1 up to but not including 1, in steps of 2⁻²³.
    pub fn symmetric(&mut self) -> f32 {
        let fraction = (self.bits() >> 40) as f32 / (1u32 << 24) as f32;
        2.0 * fraction - 1.0
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f32 {
        let scale = 1.0 / (1u64 << 53) as f64;
        let radius = ((self.bits() >> 11) as f64 + 0.5) * scale;
        let angle = (self.bits() >> 11) as f64 * scale * std::f64::consts::TAU;
        ((-2.0 * radius.ln()).sqrt() * angle.cos()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_by_seed_and_name_and_stay_in_range() {
        let mut first = Generator::of(7, "fc1.weight");
        let drawn: Vec<f32> = (0..1000).map(|_| first.symmetric()).collect();
        assert!(drawn.iter().all(|value| (-1.0..1.0).contains(value)));
        let mean = drawn.iter().sum::<f32>() / 1000.0;
        assert!(mean.abs() < 0.1, "{mean}");
        assert_ne!(drawn[0], Generator::of(8, "fc1.weight").symmetric());
        assert_ne!(drawn[0], Generator::of(7, "fc2.weight").symmetric());
        assert_eq!(drawn[0], Generator::of(7, "fc1.weight").symmetric());
    }

    #[test]
    fn the_normal_has_mean_zero_and_variance_one() {
        let mut generator = Generator::of(1, "table");
        let drawn: Vec<f32> = (0..10_000).map(|_| generator.normal()).collect();
        let mean = drawn.iter().sum::<f32>() / 1e4;
        let variance = drawn.iter().map(|value| value * value).sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }
}
